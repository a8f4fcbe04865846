/* The limit of a table lookup: copy rows whose numbers are known, fetched ahead. No hash, no index.
 *
 *   rows     float32[V, D]   on a cache-line border
 *   numbers  int64[N]
 *   out      float32[N, D]
 *
 * Twice: fetched ahead into the first-level cache, as such loops usually do, and into the second level, which on some
 * CPUs has many more misses under way and is then the harder limit.
 */
#include <stdint.h>

#define AHEAD_LINES 64 /* lines under way: as many rows ahead as fill this */

#define GATHER(NAME, DIM, LOCALITY)                                                                              \
  void NAME##_##DIM(const float *restrict rows, const int64_t *numbers, int64_t n, float *restrict out) {       \
    enum { kBytes = DIM * 4, kAhead = AHEAD_LINES * 64 / kBytes > 16 ? AHEAD_LINES * 64 / kBytes : 16 };         \
    for (int64_t i = 0; i < n; ++i) {                                                                            \
      if (i + kAhead < n) {                                                                                      \
        const char *next = (const char *)(rows + numbers[i + kAhead] * DIM);                                     \
        for (int at = 0; at < kBytes; at += 64) __builtin_prefetch(next + at, 0, LOCALITY);                      \
      }                                                                                                          \
      const float *row = rows + numbers[i] * DIM;                                                                \
      for (int c = 0; c < DIM; ++c) out[i * DIM + c] = row[c];                                                   \
    }                                                                                                            \
  }

GATHER(gather_l1, 32, 3)
GATHER(gather_l1, 128, 3)
GATHER(gather_l2, 16, 2)
GATHER(gather_l2, 32, 2)
GATHER(gather_l2, 128, 2)
