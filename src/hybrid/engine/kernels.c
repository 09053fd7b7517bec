/* What torch has no single operation for, for processors: float32, rows of a step in parallel.

   Compiled on the machine it runs on (kernels.py) and called through ctypes. Threads are those of
   torch's own OpenMP. Strides count floats. Every sum has one order, whatever runs beside it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

extern int omp_get_thread_num(void);

/* e^x to 1 ulp or two for x <= 0, without leaving vector registers (Cephes' polynomial). */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = nearbyintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

/* y[rows, dim] = x / sqrt(mean(x^2) + eps) * w */
void rms_norm(const float *x, const float *w, float *y, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for if (rows * dim > 1 << 15)
    for (int64_t i = 0; i < rows; i++) {
        const float *in = x + i * dim;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < dim; j++) sum += in[j] * in[j];
        float s = 1.0f / sqrtf(sum / dim + eps);
#pragma omp simd
        for (int64_t j = 0; j < dim; j++) y[i * dim + j] = in[j] * s * w[j];
    }
}

/* z[rows, dim] = silu(gate) * up; gate and up lie side by side in y[rows, 2 * dim] */
void silu_mul(const float *y, float *z, int64_t rows, int64_t dim) {
#pragma omp parallel for if (rows * dim > 1 << 14)
    for (int64_t i = 0; i < rows; i++) {
        const float *g = y + i * 2 * dim, *u = g + dim;
#pragma omp simd
        for (int64_t j = 0; j < dim; j++) {
            /* e^-|g| is at most 1, so that nothing overflows */
            float e = exp_(-fabsf(g[j]));
            float sigmoid = (g[j] >= 0 ? 1.0f : e) / (1.0f + e);
            z[i * dim + j] = g[j] * sigmoid * u[j];
        }
    }
}

/* Decoding: n requests, one token each. heads[T, q_heads + 2 * kv_heads, dim] holds queries, keys
   and values; request i is its row `rows[i]`, and row `places[i]` of the cache, where its key and
   value go to `offsets[i]`: keys[rows, kv_heads, dim, capacity], values[rows, kv_heads, capacity,
   dim]. Each query sees the last `window` tokens (0: all). out[T, q_heads * dim]. scratch: for each
   thread q_heads / kv_heads * capacity floats. */
void decode_attention(const float *heads, const int64_t *rows, const int64_t *places,
                      const int64_t *offsets, int64_t n, float *keys, float *values,
                      int64_t capacity, int64_t q_heads, int64_t kv_heads, int64_t dim,
                      int64_t window, float scale, float *scratch, float *out) {
    const int64_t group = q_heads / kv_heads, width = (q_heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(dynamic, 4) collapse(2)
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const float *row = heads + rows[i] * width;
            const float *k = row + (q_heads + h) * dim, *v = k + kv_heads * dim;
            float *kt = keys + (places[i] * kv_heads + h) * dim * capacity;
            float *vs = values + (places[i] * kv_heads + h) * capacity * dim;
            const int64_t at = offsets[i], first = window && at >= window ? at - window + 1 : 0;
            const int64_t count = at + 1 - first;
            /* whole vectors: what is beyond the last token is computed, and left alone */
            const int64_t whole = (count + 15) & ~(int64_t)15;
            const int64_t wide = whole <= capacity - first ? whole : capacity - first;
            float *scores = scratch + omp_get_thread_num() * group * capacity;
            memset(scores, 0, group * wide * sizeof(float));
            const char *ahead = (const char *)(vs + first * dim);
            const int64_t lines = (count * dim * 4 + 63) / 64, each = (lines + dim - 1) / dim;
            for (int64_t d = 0; d < dim; d++) {
                for (int64_t j = d * each; j < (d + 1) * each && j < lines; j++)
                    __builtin_prefetch(ahead + 64 * j);
                float *line = kt + d * capacity;
                line[at] = k[d];
                for (int64_t g = 0; g < group; g++) {
                    const float q = row[(h * group + g) * dim + d] * scale;
                    float *s = scores + g * wide;
#pragma omp simd
                    for (int64_t t = 0; t < wide; t++) s[t] += q * line[first + t];
                }
            }
            memcpy(vs + at * dim, v, dim * sizeof(float));
            for (int64_t g = 0; g < group; g++) {
                float *s = scores + g * wide, top = s[0], sum = 0;
#pragma omp simd reduction(max : top)
                for (int64_t t = 0; t < count; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
                for (int64_t t = 0; t < count; t++) {
                    s[t] = exp_(s[t] - top);
                    sum += s[t];
                }
                float inverse = 1.0f / sum;
#pragma omp simd
                for (int64_t t = 0; t < count; t++) s[t] *= inverse;
                memset(out + (rows[i] * q_heads + h * group + g) * dim, 0, dim * sizeof(float));
            }
            ahead = (const char *)(kt + dim * capacity + first); /* the next head's keys */
            const int64_t reach = h + 1 < kv_heads ? dim : 0, step = (dim + count - 1) / count;
            for (int64_t t = 0; t < count; t++) {
                for (int64_t j = t * step; j < (t + 1) * step && j < reach; j++)
                    for (int64_t c = 0; c < wide * 4; c += 64)
                        __builtin_prefetch(ahead + j * capacity * 4 + c);
                const float *line = vs + (first + t) * dim;
                for (int64_t g = 0; g < group; g++) {
                    float *o = out + (rows[i] * q_heads + h * group + g) * dim;
                    const float p = scores[g * wide + t];
#pragma omp simd
                    for (int64_t d = 0; d < dim; d++) o[d] += p * line[d];
                }
            }
        }
}

typedef float lanes16 __attribute__((vector_size(64), aligned(4)));
typedef float lanes8 __attribute__((vector_size(32), aligned(4)));

/* to[r, columns] += sum over k of s[r, k] * m[k, columns], for R rows and one vector of columns */
#define PRODUCT(LANES)                                                                      \
    static inline __attribute__((always_inline)) void product_##LANES(                      \
        const int R, const float *s, int64_t s_stride, const float *m, int64_t m_stride,    \
        int64_t depth, float *to, int64_t to_stride) {                                      \
        LANES sum[8];                                                                       \
        for (int r = 0; r < R; r++) sum[r] = *(const LANES *)(to + r * to_stride);          \
        for (int64_t k = 0; k < depth; k++) {                                               \
            const LANES line = *(const LANES *)(m + k * m_stride);                          \
            for (int r = 0; r < R; r++) sum[r] += s[r * s_stride + k] * line;               \
        }                                                                                   \
        for (int r = 0; r < R; r++) *(LANES *)(to + r * to_stride) = sum[r];                \
    }
PRODUCT(lanes16)
PRODUCT(lanes8)

#define CASE(R, LANES)                                                                      \
    case R:                                                                                 \
        product_##LANES(R, s, s_stride, m + c, m_stride, depth, to + c, to_stride);         \
        break;
#define CASES(LANES)                                                                        \
    switch (rows) {                                                                         \
        CASE(1, LANES) CASE(2, LANES) CASE(3, LANES) CASE(4, LANES)                         \
        CASE(5, LANES) CASE(6, LANES) CASE(7, LANES) CASE(8, LANES)                         \
    }

/* The same for all columns, for 1 to 8 rows. */
static void products(int64_t rows, const float *s, int64_t s_stride, const float *m,
                     int64_t m_stride, int64_t depth, float *to, int64_t to_stride,
                     int64_t columns) {
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) CASES(lanes16)
    for (; c + 8 <= columns; c += 8) CASES(lanes8)
    for (int64_t r = 0; c < columns && r < rows; r++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = c; j < columns; j++)
                to[r * to_stride + j] += s[r * s_stride + k] * m[k * m_stride + j];
}

/* LoRA: rows starts[i] to starts[i + 1] of x[T, in] and y[T, out], 8 at most, are of an adapter whose
   weights begin at bases[i]: at `a` lies A [in, parts * rank], at b[p] the [rank, lasts[p] -
   firsts[p]] that is added to columns firsts[p] to lasts[p] of y. */
void lora(const float *x, float *y, const int64_t *starts, int64_t pieces,
          const float *const *bases, int64_t in, int64_t out, int64_t rank, int64_t parts,
          int64_t a, const int64_t *b, const int64_t *firsts, const int64_t *lasts) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = starts[i], rows = starts[i + 1] - first, w = parts * rank;
        float low[rows * w];
        memset(low, 0, sizeof(low));
        products(rows, x + first * in, in, bases[i] + a, w, in, low, w, w);
        for (int64_t p = 0; p < parts; p++) {
            const int64_t n = lasts[p] - firsts[p];
            products(rows, low + p * rank, w, bases[i] + b[p], n, rank,
                     y + first * out + firsts[p], out, n);
        }
    }
}
