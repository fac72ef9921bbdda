/* The networks and the heads as one library, for one kind of vectors: build.py has the variants. */
#include <math.h>

#include "vectors.h"
#include "winograd.h"
#include "dense.h"
#include "network.h"
#include "impala.h"
#include "nature.h"
#include "heads.h"
