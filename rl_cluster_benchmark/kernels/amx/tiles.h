/* AMX tiles: products of bfloat16 matrices, in blocks of 16 columns, summed in float.
 *
 * The left matrix is read where it lies, row by row. The right one is packed: packed[k / 2][column][k % 2], 16 columns,
 * so that one 64-byte line holds a pair of rows.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define TILE_PAIRS 16                 /* pairs of rows of the right matrix in one tile */
#define PACKED_PAIR (2 * LANES)       /* elements in one packed pair of rows */
typedef uint16_t bf16;

INLINE __m512 load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE __m256i to_bf16(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

INLINE void store_bf16(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, to_bf16(values)); }

/* (a0 b0 a1 b1 ...) of two rows of 16. */
INLINE __m512i interleave(__m256i a, __m256i b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

/* The transpose of 16 x 16 words of 32 bits. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Ask the system for permission to use tiles, once in a process. All eight tiles are 16 rows of 64 bytes. */
static int tiles_allowed(void) {
#if defined(EMULATED_AMX)
    return 1;
#elif defined(SYS_arch_prctl)
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

static void tiles_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}

static void tiles_end(void) { _tile_release(); }

/* Make the compiler finish its stores before a tile load, which it does not know to read memory. */
INLINE void tiles_see_memory(void) { __asm__ volatile("" ::: "memory"); }
