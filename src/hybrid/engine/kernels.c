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

/* best[i] = the first of the largest of x[i, dim] */
void argmax(const float *x, int64_t *best, int64_t rows, int64_t dim) {
#pragma omp parallel for if (rows * dim > 1 << 15)
    for (int64_t i = 0; i < rows; i++) {
        const float *in = x + i * dim;
        float top = in[0];
        int64_t at = 0;
        for (int64_t first = 0; first < dim; first += 256) { /* which part has it, then where */
            const int64_t last = first + 256 < dim ? first + 256 : dim;
            float most = in[first];
#pragma omp simd reduction(max : most)
            for (int64_t j = first; j < last; j++) most = in[j] > most ? in[j] : most;
            if (most > top) top = most, at = first;
        }
        while (at + 1 < dim && in[at] != top) at++;
        best[i] = at;
    }
}

typedef float lanes16 __attribute__((vector_size(64), aligned(4)));
typedef float lanes8 __attribute__((vector_size(32), aligned(4)));

/* to[r, columns] += sum over k of s[r, k] * m[k, columns], for R rows and C vectors of columns.
   Even and odd k are summed apart, so that additions need not wait for one another. */
#define PRODUCT(LANES, C)                                                                   \
    static inline __attribute__((always_inline)) void product_##LANES##_##C(                \
        const int R, const float *s, int64_t s_stride, const float *m, int64_t m_stride,    \
        int64_t depth, float *to, int64_t to_stride) {                                      \
        const int lanes = sizeof(LANES) / 4;                                                \
        LANES even[8][C], odd[8][C];                                                        \
        for (int r = 0; r < R; r++)                                                         \
            for (int c = 0; c < C; c++) {                                                   \
                even[r][c] = *(const LANES *)(to + r * to_stride + c * lanes);              \
                odd[r][c] = even[r][c] - even[r][c];                                        \
            }                                                                               \
        int64_t k = 0;                                                                      \
        for (; k + 2 <= depth; k += 2)                                                      \
            for (int c = 0; c < C; c++) {                                                   \
                const LANES one = *(const LANES *)(m + k * m_stride + c * lanes);           \
                const LANES two = *(const LANES *)(m + (k + 1) * m_stride + c * lanes);     \
                for (int r = 0; r < R; r++) even[r][c] += s[r * s_stride + k] * one;        \
                for (int r = 0; r < R; r++) odd[r][c] += s[r * s_stride + k + 1] * two;     \
            }                                                                               \
        for (int c = 0; c < C && k < depth; c++)                                            \
            for (int r = 0; r < R; r++)                                                     \
                even[r][c] += s[r * s_stride + k] * *(const LANES *)(m + k * m_stride + c * lanes); \
        for (int r = 0; r < R; r++)                                                         \
            for (int c = 0; c < C; c++)                                                     \
                *(LANES *)(to + r * to_stride + c * lanes) = even[r][c] + odd[r][c];        \
    }
PRODUCT(lanes16, 4)
PRODUCT(lanes16, 1)
PRODUCT(lanes8, 1)

#define CASE(R, KIND)                                                                       \
    case R:                                                                                 \
        product_##KIND(R, s, s_stride, m + c, m_stride, depth, to + c, to_stride);          \
        break;
#define CASES(KIND)                                                                         \
    switch (rows) {                                                                         \
        CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND)                             \
        CASE(5, KIND) CASE(6, KIND) CASE(7, KIND) CASE(8, KIND)                             \
    }
#define FEW(KIND)                                                                           \
    switch (rows) { CASE(1, KIND) CASE(2, KIND) }

/* The same for all columns, for 1 to 8 rows. */
static void products(int64_t rows, const float *s, int64_t s_stride, const float *m,
                     int64_t m_stride, int64_t depth, float *to, int64_t to_stride,
                     int64_t columns) {
    int64_t c = 0;
    if (rows <= 2)
        for (; c + 64 <= columns; c += 64) FEW(lanes16_4)
    for (; c + 16 <= columns; c += 16) CASES(lanes16_1)
    for (; c + 8 <= columns; c += 8) CASES(lanes8_1)
    for (int64_t r = 0; c < columns && r < rows; r++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = c; j < columns; j++)
                to[r * to_stride + j] += s[r * s_stride + k] * m[k * m_stride + j];
}

/* e^(s - max) over their sum, for s[first, last); 0 in the rest of s[0, width). */
static inline void softmax(float *s, int64_t first, int64_t last, int64_t width) {
    float top = s[first], sum = 0;
#pragma omp simd reduction(max : top)
    for (int64_t t = first; t < last; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = first; t < last; t++) {
        s[t] = exp_(s[t] - top);
        sum += s[t];
    }
    const float inverse = 1.0f / sum;
#pragma omp simd
    for (int64_t t = first; t < last; t++) s[t] *= inverse;
    memset(s, 0, first * sizeof(float));
    memset(s + last, 0, (width - last) * sizeof(float));
}

/* Decoding: n requests, one token each. heads[T, q_heads + 2 * kv_heads, dim] holds queries, keys
   and values; request i is its row `rows[i]`, and row `places[i]` of the cache, where its key and
   value go to `offsets[i]`: keys[rows, kv_heads, dim, capacity], values[rows, kv_heads, capacity,
   dim]. Each query sees the last `window` tokens (0: all). out[T, q_heads * dim]. scratch: for each
   of `threads` q_heads / kv_heads * (capacity + dim) floats. */
void decode_attention(const float *heads, const int64_t *rows, const int64_t *places,
                      const int64_t *offsets, int64_t n, float *keys, float *values,
                      int64_t capacity, int64_t q_heads, int64_t kv_heads, int64_t dim,
                      int64_t window, float scale, int64_t threads, float *scratch,
                      float *out) {
    const int64_t group = q_heads / kv_heads, width = (q_heads + 2 * kv_heads) * dim;
    const int64_t chunk = n < 2 * threads ? 1 : kv_heads; /* a request's heads, if there are many */
#pragma omp parallel for collapse(2) schedule(dynamic, chunk) num_threads(threads)
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
            /* the head that comes next is on its way from memory while this one is worked on */
            const int64_t j = h + 1 < kv_heads ? i : i + 1, m = j == i ? h + 1 : 0;
            const int64_t place = (j < n ? places[j] : places[i]) * kv_heads + m;
            const char *next_k = (const char *)(keys + place * dim * capacity + first);
            const char *next_v = (const char *)(values + (place * capacity + first) * dim);
            float *scores = scratch + omp_get_thread_num() * group * (capacity + dim);
            float *asked = scores + group * capacity;
            memset(scores, 0, group * wide * sizeof(float));
            for (int64_t d = 0; d < dim; d++) {
                for (int64_t c = 0; c < wide * 4; c += 64)
                    __builtin_prefetch(next_k + d * capacity * 4 + c, 0, 2);
                kt[d * capacity + at] = k[d];
            }
            for (int64_t d = 0; d < group * dim; d++) asked[d] = row[h * group * dim + d] * scale;
            for (int64_t g = 0; g < group; g += 8)
                products(group - g < 8 ? group - g : 8, asked + g * dim, dim, kt + first, capacity,
                         dim, scores + g * wide, wide, wide);
            memcpy(vs + at * dim, v, dim * sizeof(float));
            for (int64_t c = 0; c < count * dim * 4; c += 64) __builtin_prefetch(next_v + c, 0, 2);
            float *o = out + (rows[i] * q_heads + h * group) * dim;
            memset(o, 0, group * dim * sizeof(float));
            for (int64_t g = 0; g < group; g++) softmax(scores + g * wide, 0, count, wide);
            for (int64_t g = 0; g < group; g += 8)
                products(group - g < 8 ? group - g : 8, scores + g * wide, wide, vs + first * dim,
                         dim, count, o + g * dim, dim, dim);
        }
}

/* Pieces of prompts: piece i is rows starts[i] to stops[i] and begins at `offsets[i]` of its request.
   The rest is as in decode_attention; scratch: for each thread 8 * (capacity + 2 * dim) floats. Eight
   queries are worked on together, so that keys and values are read once for all of them. */
void prompt_attention(const float *heads, const int64_t *starts, const int64_t *stops,
                      const int64_t *places, const int64_t *offsets, int64_t n, float *keys,
                      float *values, int64_t capacity, int64_t q_heads, int64_t kv_heads,
                      int64_t dim, int64_t window, float scale, int64_t threads, float *scratch,
                      float *out) {
    const int64_t group = q_heads / kv_heads, width = (q_heads + 2 * kv_heads) * dim;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t count = stops[i] - starts[i], offset = offsets[i];
            const float *rows = heads + starts[i] * width;
            float *kt = keys + (places[i] * kv_heads + h) * dim * capacity;
            float *vs = values + (places[i] * kv_heads + h) * capacity * dim;
            float *scores = scratch + omp_get_thread_num() * 8 * (capacity + 2 * dim);
            float *asked = scores + 8 * capacity, *o = asked + 8 * dim;
            for (int64_t d = 0; d < dim; d++)
                for (int64_t t = 0; t < count; t++)
                    kt[d * capacity + offset + t] = rows[t * width + (q_heads + h) * dim + d];
            for (int64_t t = 0; t < count; t++)
                memcpy(vs + (offset + t) * dim, rows + t * width + (q_heads + kv_heads + h) * dim,
                       dim * sizeof(float));
            for (int64_t g = h * group; g < (h + 1) * group; g++)
                for (int64_t t = 0; t < count; t += 8) {
                    const int64_t many = count - t < 8 ? count - t : 8, at = offset + t;
                    const int64_t first = window && at >= window ? at - window + 1 : 0;
                    const int64_t seen = at + many - first;
                    /* whole vectors: what is beyond is computed, and set to 0 by the softmax */
                    const int64_t whole = (seen + 15) & ~(int64_t)15;
                    const int64_t wide = whole <= capacity - first ? whole : capacity - first;
                    for (int64_t r = 0; r < many; r++)
                        for (int64_t d = 0; d < dim; d++)
                            asked[r * dim + d] = rows[(t + r) * width + g * dim + d] * scale;
                    memset(scores, 0, many * wide * sizeof(float));
                    products(many, asked, dim, kt + first, capacity, dim, scores, wide, wide);
                    for (int64_t r = 0; r < many; r++) {
                        const int64_t last = at + r + 1 - first;
                        softmax(scores + r * wide, window && last > window ? last - window : 0,
                                last, wide);
                    }
                    memset(o, 0, many * dim * sizeof(float));
                    products(many, scores, wide, vs + first * dim, dim, seen, o, dim, dim);
                    for (int64_t r = 0; r < many; r++)
                        memcpy(out + ((starts[i] + t + r) * q_heads + g) * dim, o + r * dim,
                               dim * sizeof(float));
                }
        }
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
