/* Vectors of VL floats by the compiler's vector types: one source for AVX-512 (VL = 16), AVX2 (8), NEON and the rest (4). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef VL
#define VL 4
#endif
#ifndef PAGE
#define PAGE 4096 /* bytes; with less, sanitizers see what is read far beyond the end of memory */
#endif
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define MOST_SUMS 18 /* vectors that a product keeps in registers */

typedef float vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t lanes __attribute__((vector_size(4 * VL), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec values) { *(vec *)to = values; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(lanes mask, vec yes, vec no) { return (vec)((mask & (lanes)yes) | (~mask & (lanes)no)); }

/* `values` where `sign` is positive or NaN, else zero. */
INLINE vec where_positive(vec sign, vec values) { return (vec)((lanes)values & ~(sign <= 0)); }
INLINE vec relu(vec values) { return where_positive(values, values); }

INLINE int smaller(int a, int b) { return a < b ? a : b; }

/* Return zeroed memory for this many floats, and a little more, or NULL. */
static float *allocate(long count) {
    const long size = (4 * count + PAGE - 1) / PAGE * PAGE + PAGE;
    void *memory = aligned_alloc(PAGE, size);
    return memory ? memset(memory, 0, size) : NULL;
}

/* sums[rows][vectors] += left x right, where element (i, k) of `left` stands at i * row + k * step, and row k of `right`
 * at k * right_step. The compiler keeps the sums in registers only if the numbers of rows and vectors are constants. */
INLINE void multiply(const int rows, const int vectors, vec *sums, const float *left, const long row, const long step,
                     const float *right, const long right_step, const int count) {
    for (int k = 0; k < count; k++) {
        vec columns[4];
        UNROLL for (int v = 0; v < vectors; v++) columns[v] = load(right + k * right_step + v * VL);
        UNROLL for (int i = 0; i < rows; i++) {
            const vec value = all(left[i * row + k * step]);
            UNROLL for (int v = 0; v < vectors; v++) sums[i * vectors + v] += value * columns[v];
        }
    }
}

INLINE void load_sums(const int rows, const int vectors, vec *sums, const float *from, long row) {
    UNROLL for (int i = 0; i < rows * vectors; i++) sums[i] = load(from + i / vectors * row + i % vectors * VL);
}

INLINE void store_sums(const int rows, const int vectors, const vec *sums, float *to, long row) {
    UNROLL for (int i = 0; i < rows * vectors; i++) store(to + i / vectors * row + i % vectors * VL, sums[i]);
}
