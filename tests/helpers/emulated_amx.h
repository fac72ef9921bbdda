/* AMX tiles in plain C, so that the code for them can be checked on a CPU that has none: gcc -include this file. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static uint8_t emulated_tiles[8][16][64];

static inline float emulated_float(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static __attribute__((noinline)) void emulated_load(int tile, const void *from, long stride) {
    for (int r = 0; r < 16; r++) memcpy(emulated_tiles[tile][r], (const char *)from + r * stride, 64);
}

static __attribute__((noinline)) void emulated_store(int tile, void *to, long stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, emulated_tiles[tile][r], 64);
}

static __attribute__((noinline)) void emulated_multiply(int sum, int left, int right) {
    for (int r = 0; r < 16; r++) {
        float totals[16];
        uint16_t row[32], pairs[32];
        memcpy(totals, emulated_tiles[sum][r], 64);
        memcpy(row, emulated_tiles[left][r], 64);
        for (int k = 0; k < 16; k++) {
            memcpy(pairs, emulated_tiles[right][k], 64);
            for (int c = 0; c < 16; c++)
                totals[c] += emulated_float(row[2 * k]) * emulated_float(pairs[2 * c]) +
                             emulated_float(row[2 * k + 1]) * emulated_float(pairs[2 * c + 1]);
        }
        memcpy(emulated_tiles[sum][r], totals, 64);
    }
}

#define EMULATED_AMX 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sum, left, right) emulated_multiply(sum, left, right)
