/* Max-pooling 3x3, stride 2, padding 1, of channels-last images, forward and backward.
 *
 * Torch stores the winner of a window as a 64-bit index and scatters gradients through it. Here a winner is one byte
 * (its place in the window, 0 to 8), and the gradients of 2x2 pixels are gathered from the at most four windows they
 * belong to: no zeroing, no read-modify-write. Results are torch's: the first of equal values wins, NaN wins over
 * numbers.
 *
 * Images are [batch, height, width, channels], channels a multiple of 16; values float or bfloat16 (as uint16_t).
 */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

INLINE floats load_float(const float *from) {
    floats values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store_float(float *to, floats values) { memcpy(to, &values, sizeof values); }

INLINE floats load_bfloat16(const uint16_t *from) {
    halves packed;
    memcpy(&packed, from, sizeof packed);
    return (floats)(__builtin_convertvector(packed, words) << 16);
}

INLINE void store_bfloat16(uint16_t *to, floats values) {
    words bits = (words)values;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    words is_nan = (words)(values != values);
    halves packed = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), halves);
    memcpy(to, &packed, sizeof packed);
}

INLINE ints load_places(const uint8_t *from) {
    bytes packed;
    memcpy(&packed, from, sizeof packed);
    return __builtin_convertvector(packed, ints);
}

INLINE void store_places(uint8_t *to, ints places) {
    bytes packed = __builtin_convertvector(places, bytes);
    memcpy(to, &packed, sizeof packed);
}

/* The functions for one element type. */
#define TYPE float
#define NAME(function) function##_float
#include "pooling_body.h"
#undef TYPE
#undef NAME

#define TYPE uint16_t
#define NAME(function) function##_bfloat16
#include "pooling_body.h"
