/* The passes of cpu_passes.py over matrices, which defines these macros before them:

   REAMP_PARALLEL   the number of elements from which a matrix is divided among threads
   REAMP_ROUNDS, REAMP_WEYL0, REAMP_WEYL1, REAMP_MULTIPLIER0, REAMP_MULTIPLIER1
                    Philox's, see philox.py */

#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "random bytes are read as they lie in little-endian words"
#endif
using namespace at::vec;
using Floats = VectorizedN<float, 2>;
constexpr int64_t WIDTH = Floats::size(), TILE = 16;
constexpr std::integral_constant<int64_t, TILE> WHOLE;  /* a number that loops are compiled for */

static inline int32_t bits(float x) { int32_t i; std::memcpy(&i, &x, 4); return i; }
static inline float number(int32_t i) { float x; std::memcpy(&x, &i, 4); return x; }

/* Return n numbers as float32, in a buffer if they are not that already. */
static inline const float *floats(const float *x, int64_t, float *) { return x; }
template <class T> static inline const float *floats(const T *x, int64_t n, float *buffer)
{
    for (int64_t i = 0; i < n; i += WIDTH) {
        const int64_t count = std::min(WIDTH, n - i);
        convert<float, 2, T, 1>(VectorizedN<T, 1>::loadu(x + i, count)).store(buffer + i, count);
    }
    return buffer;
}

template <class F> static void of_type(int type, const void *x, F f)
{
    if (type == 0) f(static_cast<const float *>(x));
    else if (type == 1) f(static_cast<const c10::Half *>(x));
    else f(static_cast<const c10::BFloat16 *>(x));
}

/* Write the largest magnitude of each block; inf if one is inf or NaN. */
extern "C" void amaxes(const void *x, int type, int64_t rows, int64_t columns, int64_t height,
                       int64_t width, float *largest, int threads)
{
    const int64_t across = columns / width;
    std::vector<float> of_rows(rows * across);
    of_type(type, x, [&](auto *of_type) {
        #pragma omp parallel num_threads(threads) if (rows * columns >= REAMP_PARALLEL)
        {
            std::vector<float> buffer(columns);
            #pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                const float *row = floats(of_type + r * columns, columns, buffer.data());
                float *out = of_rows.data() + r * across;
                for (int64_t c = 0; c < columns; c += width) {
                    int32_t most = 0;
                    for (int64_t i = 0; i < width; i++)
                        most = std::max(most, bits(row[c + i]) & 0x7FFFFFFF);
                    out[c / width] = number(std::min(most, 0x7F800000));
                }
            }
        }
    });
    std::fill(largest, largest + rows / height * across, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
        float *out = largest + r / height * across;
        for (int64_t c = 0; c < across; c++) out[c] = std::max(out[c], of_rows[r * across + c]);
    }
}

/* Magnitudes are rounded by an addition: the last bit of a float `ahead` binary places above a number
   is worth as much as the last bit that the number keeps, so the sum has the number's code in its
   lowest bits. Numbers below the smallest normal one are rounded as that one is. */

/* The FP8 code of a number, saturated, to nearest even; NaN stays NaN. */
template <bool E4M3> static inline uint8_t fp8(float x)
{
    constexpr int MANTISSA = E4M3 ? 3 : 2, BIAS = E4M3 ? 7 : 15, AHEAD = 23 - MANTISSA;
    constexpr int32_t LARGEST = E4M3 ? 0x43E00000 : 0x47600000;  /* 448 and 57344 */
    const int32_t all = bits(x), size = std::min(all & 0x7FFFFFFF, LARGEST);
    const int32_t exponent = std::max(size & 0x7F800000, (128 - BIAS) << 23);
    const int32_t added = exponent + (AHEAD << 23);
    const int32_t kept = bits(number(size) + number(added)) - added;
    const int32_t code = kept + (exponent >> AHEAD) - ((128 - BIAS) << MANTISSA);
    return ((all >> 24) & 0x80) | ((all & 0x7FFFFFFF) > 0x7F800000 ? 0x7F : code);
}

/* The factor that brings numbers of up to `amax` to `largest` at most, rounded down to a power of 2. */
static inline float power_below(float largest, float amax)
{
    const int32_t of_largest = bits(largest), carried = bits(amax) + 0x7FFFFF - (of_largest & 0x7FFFFF);
    return number(std::min((of_largest >> 23) + 127 - (carried >> 23), 253) << 23);
}

/* Write the factors of blocks, and their inverse, as float32 or as E8M0. */
extern "C" void scales(const float *amax, int64_t n, float largest, int power_of_2, const float *given,
                       float *factors, float *inverse, uint8_t *exponents)
{
    for (int64_t i = 0; i < n; i++) {
        float factor = std::min(largest / amax[i], FLT_MAX);
        if (power_of_2) factor = power_below(largest, amax[i]);
        if (amax[i] == 0 && !exponents) factor = 1;
        if (!(amax[i] < INFINITY)) factor = NAN;
        if (given && *given > 0) factor = *given;
        factors[i] = factor;
        const float inverted = amax[i] < INFINITY ? 1 / factor : NAN;
        if (exponents) exponents[i] = bits(inverted) >> 23;
        else inverse[i] = inverted;
    }
}

/* Write the two levels of NVFP4's scales: those of blocks as E4M3, their factors, the tensor's. */
extern "C" void two_levels(const float *amax, int64_t n, uint8_t *of_blocks, float *factors,
                           float *outer)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, amax[i]);
    float encode = std::min(2688 / largest, FLT_MAX);
    if (largest == 0 || encode == 0) encode = 1;
    const float decode = 1 / encode, by = encode * (1 / 6.0f);
    *outer = largest < INFINITY ? decode : NAN;
    for (int64_t i = 0; i < n; i++) {
        const int32_t code = of_blocks[i] = fp8<true>(amax[i] * by);
        const float scale = code < 8 ? code / 512.0f : number((code << 20) + (120 << 23));
        factors[i] = std::min(1 / (scale * decode), FLT_MAX);
    }
}

template <bool E4M3, class T>
static void write_fp8(const T *x, int64_t rows, int64_t columns, int64_t height, int64_t width,
                      const float *factors, uint8_t *values, int threads)
{
    #pragma omp parallel num_threads(threads) if (rows * columns >= REAMP_PARALLEL)
    {
        std::vector<float> buffer(columns);
        #pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const float *row = floats(x + r * columns, columns, buffer.data());
            const float *factor = factors + r / height * (columns / width);
            uint8_t *out = values + r * columns;
            for (int64_t c = 0; c < columns; c += width, factor++) {
                const float by = *factor;
                for (int64_t i = c; i < c + width; i++) out[i] = fp8<E4M3>(row[i] * by);
            }
        }
    }
}

extern "C" void to_fp8(const void *x, int type, int64_t rows, int64_t columns, int64_t height,
                       int64_t width, const float *factors, int is_e4m3, uint8_t *values, int threads)
{
    of_type(type, x, [&](auto *of_type) {
        auto write = is_e4m3 ? write_fp8<true, std::decay_t<decltype(*of_type)>>
                             : write_fp8<false, std::decay_t<decltype(*of_type)>>;
        write(of_type, rows, columns, height, width, factors, values, threads);
    });
}

/* Where random bits begin; see Draw. */
struct Draw { int64_t seed, name, last_word; const int64_t *calls; };

/* Philox4x32-10 for LANES groups of numbers from `first` on. */
constexpr int LANES = 16;
static inline void philox(const Draw &draw, int64_t first, uint32_t words[LANES][4])
{
    uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
    uint32_t low = (uint32_t)draw.seed, high = (uint32_t)(draw.seed >> 32);
    for (int k = 0; k < LANES; k++) {
        a[k] = (uint32_t)(first + k);
        b[k] = (uint32_t)*draw.calls;
        c[k] = (uint32_t)draw.name;
        d[k] = (uint32_t)draw.last_word;
    }
    for (int round = 0; round < REAMP_ROUNDS; round++, low += REAMP_WEYL0, high += REAMP_WEYL1) {
        #pragma omp simd
        for (int k = 0; k < LANES; k++) {
            const uint64_t of_a = (uint64_t)a[k] * REAMP_MULTIPLIER0;
            const uint64_t of_c = (uint64_t)c[k] * REAMP_MULTIPLIER1;
            a[k] = (uint32_t)(of_c >> 32) ^ b[k] ^ low;
            b[k] = (uint32_t)of_c;
            c[k] = (uint32_t)(of_a >> 32) ^ d[k] ^ high;
            d[k] = (uint32_t)of_a;
        }
    }
    for (int k = 0; k < LANES; k++) {
        words[k][0] = a[k];
        words[k][1] = b[k];
        words[k][2] = c[k];
        words[k][3] = d[k];
    }
}

/* The exponent, in place, of the numbers of E2M1 around a magnitude: 1 for all below 2. */
static inline int32_t fp4_exponent(int32_t size) { return std::max(size & 0x7F800000, 127 << 23); }

/* The FP4 code of a number, saturated; rounded by a byte, or to the nearest code. */
template <bool RANDOM> static inline int32_t fp4(float x, int32_t byte)
{
    const int32_t all = bits(x), size = std::min(all & 0x7FFFFFFF, 0x40C00000);  /* 6 */
    int32_t exponent = fp4_exponent(size), kept;
    if (RANDOM) {
        const float step = number(exponent - (1 << 23));
        const float raised = number(size) + (float)byte * (1.0f / 256) * step;
        exponent = fp4_exponent(bits(raised));
        kept = (int32_t)(raised * number((255 << 23) - exponent));
    } else {
        const int32_t added = exponent + (22 << 23);
        kept = bits(number(size) + number(added)) - added;
    }
    const int32_t code = kept + (exponent >> 22) - 254;
    return (all & 0x7FFFFFFF) > 0x7F800000 ? 7 : code | ((all >> 28) & 8);
}

template <bool RANDOM, class T>
static void write_fp4(const T *x, int64_t rows, int64_t columns, int64_t height, int64_t width,
                      const float *factors, const Draw &draw, uint8_t *values, int threads)
{
    #pragma omp parallel num_threads(threads) if (rows * columns >= REAMP_PARALLEL)
    {
        std::vector<float> buffer(columns);
        #pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const float *row = floats(x + r * columns, columns, buffer.data());
            const float *factor = factors + r / height * (columns / width);
            uint8_t *out = values + r * (columns / 2);
            for (int64_t c = 0; c < columns; c += 16 * LANES) {
                uint32_t words[LANES][4];
                if (RANDOM) philox(draw, (r * columns + c) / 16, words);
                for (int k = 0; k < LANES && c + 16 * k < columns; k++) {
                    const float by = factor[(c + 16 * k) / width], *group = row + c + 16 * k;
                    int32_t code[16];
                    uint8_t bytes[16] = {};
                    if (RANDOM) std::memcpy(bytes, words[k], 16);
                    for (int i = 0; i < 16; i++) code[i] = fp4<RANDOM>(group[i] * by, bytes[i]);
                    for (int i = 0; i < 8; i++)
                        out[(c + 16 * k) / 2 + i] = code[2 * i] | code[2 * i + 1] << 4;
                }
            }
        }
    }
}

extern "C" void to_fp4(const void *x, int type, int64_t rows, int64_t columns, int64_t height,
                       int64_t width, const float *factors, const int64_t *calls, int64_t seed,
                       int64_t name, int64_t last_word, uint8_t *values, int threads)
{
    const Draw draw = {seed, name, last_word, calls};
    of_type(type, x, [&](auto *of_type) {
        auto write = calls ? write_fp4<true, std::decay_t<decltype(*of_type)>>
                           : write_fp4<false, std::decay_t<decltype(*of_type)>>;
        write(of_type, rows, columns, height, width, factors, draw, values, threads);
    });
}

static inline uint16_t bfloat16(float x)
{
    const uint32_t all = (uint32_t)bits(x);
    return x != x ? 0x7FC0 : (all + 0x7FFF + ((all >> 16) & 1)) >> 16;
}

/* Turn a tile: row i becomes column i. Each round interleaves the halves, and `other` is lost. */
constexpr int64_t HALF = TILE * TILE / 2;
template <class T> static inline void interleave(const T *__restrict from, T *__restrict to)
{
    for (int64_t i = 0; i < HALF; i++) {
        to[2 * i] = from[i];
        to[2 * i + 1] = from[HALF + i];
    }
}

template <class T> static inline void turn(T *tile, T *other)
{
    interleave(tile, other);
    interleave(other, tile);
    interleave(tile, other);
    interleave(other, tile);
}

/* Write the transpose `[columns, padded]`: `fill` makes a tile of 16 rows and of up to 16 columns. */
template <class T, class F>
static void write_turned(int64_t columns, int64_t padded, T *turned, int threads, F fill)
{
    #pragma omp parallel for collapse(2) num_threads(threads) if (columns * padded >= REAMP_PARALLEL)
    for (int64_t r = 0; r < padded; r += TILE)
        for (int64_t c = 0; c < columns; c += TILE) {
            auto write = [&](auto wide, auto high) {
                T tile[TILE * TILE], other[TILE * TILE];
                fill(r, c, wide, tile);
                turn(tile, other);
                for (int64_t i = 0; i < wide; i++)
                    std::memcpy(turned + (c + i) * padded + r, tile + i * TILE, high * sizeof(T));
            };
            const int64_t wide = std::min(TILE, columns - c), high = std::min(TILE, padded - r);
            if (wide == TILE && high == TILE) write(WHOLE, WHOLE);
            else write(wide, high);
        }
}

extern "C" void transpose(const void *x, int size, int64_t rows, int64_t columns, int64_t padded,
                          void *turned, int threads)
{
    auto of = [&](auto sample) {
        using T = decltype(sample);
        const T *from = static_cast<const T *>(x);
        auto fill = [&](int64_t r, int64_t c, auto wide, T *tile) {
            for (int64_t i = r; i < r + TILE; i++, tile += TILE) {
                if (wide < TILE || i >= rows) std::memset(tile, 0, TILE * sizeof(T));
                if (i < rows) std::memcpy(tile, from + i * columns + c, wide * sizeof(T));
            }
        };
        write_turned(columns, padded, static_cast<T *>(turned), threads, fill);
    };
    if (size == 1) of(uint8_t());
    else if (size == 2) of(uint16_t());
    else of(uint32_t());
}

/* Write the transpose `[columns, padded]`, with a Hadamard transform of each 16 numbers in rows. */
extern "C" void transform(const void *x, int type, int64_t rows, int64_t columns, int64_t padded,
                          const float *signs, uint16_t *values, int threads)
{
    of_type(type, x, [&](auto *of_type) {
        auto fill = [&](int64_t r, int64_t c, auto wide, uint16_t *tile) {
            float sums[TILE][TILE] = {}, buffer[TILE], zeros[TILE] = {};
            for (int64_t i = 0; i < TILE; i++) {
                const float *row = zeros;
                if (r + i < rows) row = floats(of_type + (r + i) * columns + c, wide, buffer);
                for (int64_t j = 0; j < wide; j++) sums[i][j] = row[j] * signs[i];
            }
            float *const first = &sums[0][0], *const end = first + TILE * TILE;
            for (int64_t half = TILE; half < TILE * TILE; half *= 2)
                for (float *from = first; from < end; from += 2 * half)
                    #pragma omp simd
                    for (int64_t i = 0; i < half; i++) {
                        const float a = from[i], b = from[half + i];
                        from[i] = a + b;
                        from[half + i] = a - b;
                    }
            for (int64_t i = 0; i < TILE * TILE; i++) tile[i] = bfloat16(first[i] * 0.25f);
        };
        write_turned(columns, padded, values, threads, fill);
    });
}

/* The two numbers of each byte of FP4. */
struct Pairs {
    float of[256][2];
    Pairs()
    {
        for (int byte = 0; byte < 256; byte++)
            for (int half = 0; half < 2; half++) {
                const int code = byte >> 4 * half & 15, size = code & 7;
                const float magnitude = size < 2 ? size * 0.5f : number((size + 252) << 22);
                of[byte][half] = code & 8 ? -magnitude : magnitude;
            }
    }
};
static const Pairs pairs;

/* Write the numbers of a row of codes: of format 0, E4M3, of 1, E5M2, and of 2, FP4. FP8 goes by way
   of FP16, which has the exponents of E5M2; E4M3's are smaller by 8 there. */
template <int FORMAT>
static void numbers(const uint8_t *codes, int64_t n, c10::Half *halves, float *out)
{
    if (FORMAT == 2) {
        for (int64_t i = 0; i < n / 2; i++) std::memcpy(out + 2 * i, pairs.of[codes[i]], 8);
        return;
    }
    uint16_t *to = reinterpret_cast<uint16_t *>(halves);
    for (int64_t i = 0; i < n; i++) {
        const uint16_t code = codes[i], size = code & 0x7F;
        const uint16_t e4m3 = size << 7 | (size == 0x7F ? 0x7C00 : 0) | (code & 0x80) << 8;
        to[i] = FORMAT == 0 ? e4m3 : code << 8;
    }
    floats(halves, n, out);
}

/* Write values times their scales as float32. */
template <int FORMAT>
static void decode_rows(const uint8_t *values, int64_t rows, int64_t columns, int64_t height,
                        int64_t width, const float *scales, float *decoded, int threads)
{
    #pragma omp parallel num_threads(threads) if (rows * columns >= REAMP_PARALLEL)
    {
        std::vector<c10::Half> halves(columns);
        #pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const float *scale = scales + r / height * (columns / width);
            float *out = decoded + r * columns;
            numbers<FORMAT>(values + r * columns / (FORMAT == 2 ? 2 : 1), columns, halves.data(), out);
            for (int64_t c = 0; c < columns; c += width, scale++) {
                const float by = *scale;
                auto times = [&](int64_t from, auto count) {
                    for (int64_t i = from; i < from + count; i++)
                        out[i] = (FORMAT == 0 ? out[i] * 256 : out[i]) * by;
                };
                int64_t i = c;
                for (; i + TILE <= c + width; i += TILE) times(i, WHOLE);
                times(i, c + width - i);
            }
        }
    }
}

extern "C" void decode(const uint8_t *values, int format, int64_t rows, int64_t columns,
                       int64_t height, int64_t width, const float *scales, float *decoded, int threads)
{
    auto rows_of = format == 0 ? decode_rows<0> : format == 1 ? decode_rows<1> : decode_rows<2>;
    rows_of(values, rows, columns, height, width, scales, decoded, threads);
}
