/* The networks on AMX tiles, in bfloat16, and the heads, as one library: build.py says which CPUs can run it. */
#include <math.h>

#include "../source/pass.h"
#include "tiles.h"
#include "dense.h"
#include "network.h"
#include "impala.h"
#include "nature.h"
#include "../source/heads.h"
