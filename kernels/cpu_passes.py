"""The passes of quantization over matrices on the CPU, in C++: each reads and writes memory once.

Eager torch goes through memory for each operation of a formula. These passes do what
`amp.kernels.fp8` and `amp.kernels.fp4` do with single numbers, with the same bits; the scales, of which
there are few, are computed there. Compiled passes are kept for later processes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp.kernels.backend import requested
from amp.kernels.compiled_library import load
from amp.kernels.philox import MULTIPLIERS, ROUNDS, WEYL, Draw

logger = logging.getLogger("amp")

WORTH_COMPILING = 2**16
"""The number of elements from which the passes soon save more time than their compilation takes."""
PARALLEL = 2**15
"""The number of elements from which a matrix is divided among threads."""

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SIGNATURES = {
    "amaxes": "pilllpi",
    "to_fp8": "pillllpipi",
    "to_fp4": "pillllpplllpi",
    "transform": "pilllppi",
    "decode": "piplllllpi",
}
"""The arguments of each pass: pointers, 64-bit integers, and ints."""

_SOURCE = """\
#include <ATen/cpu/vec/vec.h>
#include <cstring>
#include <vector>
using namespace at::vec;
using Floats = VectorizedN<float, 2>;
constexpr int64_t WIDTH = Floats::size();

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

/* Write the largest magnitude of each `width` numbers of a row; inf if one is inf or NaN. */
extern "C" void amaxes(const void *x, int type, int64_t rows, int64_t columns, int64_t width,
                       float *largest, int threads)
{
    of_type(type, x, [&](auto *of_type) {
        #pragma omp parallel num_threads(threads) if (rows * columns >= %(parallel)d)
        {
            std::vector<float> buffer(columns);
            #pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                const float *row = floats(of_type + r * columns, columns, buffer.data());
                float *out = largest + r * (columns / width);
                for (int64_t c = 0; c < columns; c += width) {
                    int32_t most = 0;
                    for (int64_t i = 0; i < width; i++)
                        most = std::max(most, bits(row[c + i]) & 0x7FFFFFFF);
                    out[c / width] = number(std::min(most, 0x7F800000));
                }
            }
        }
    });
}

/* The FP8 code of a number, saturated, to nearest even; NaN stays NaN. */
template <bool E4M3> static inline uint8_t fp8(float x)
{
    constexpr float LARGEST = E4M3 ? 448.0f : 57344.0f;
    constexpr int MANTISSA = E4M3 ? 3 : 2, BIAS = E4M3 ? 7 : 15, SHIFT = 23 - MANTISSA;
    constexpr int STEP = 24 - BIAS - MANTISSA;
    x = x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
    const int32_t all = bits(x), size = all & 0x7FFFFFFF;
    const int32_t rounded = (size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT;
    const int32_t normal = rounded - ((127 - BIAS) << MANTISSA);
    /* Added to a number of which the last bit has the value of a subnormal's last bit. */
    const int32_t subnormal = bits(number(size) + (float)(1 << STEP)) - ((127 + STEP) << 23);
    int32_t code = size < (128 - BIAS) << 23 ? subnormal : normal;
    code = size > 0x7F800000 ? 0x7F : code;
    return ((all >> 24) & 0x80) | code;
}

template <bool E4M3, class T>
static void write_fp8(const T *x, int64_t rows, int64_t columns, int64_t height, int64_t width,
                      const float *factors, uint8_t *values, int threads)
{
    #pragma omp parallel num_threads(threads) if (rows * columns >= %(parallel)d)
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
constexpr int LANES = 8;
static inline void philox(const Draw &draw, int64_t first, uint32_t words[4][LANES])
{
    uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
    uint32_t low = (uint32_t)draw.seed, high = (uint32_t)(draw.seed >> 32);
    for (int k = 0; k < LANES; k++) {
        a[k] = (uint32_t)(first + k);
        b[k] = (uint32_t)*draw.calls;
        c[k] = (uint32_t)draw.name;
        d[k] = (uint32_t)draw.last_word;
    }
    for (int round = 0; round < %(rounds)d; round++, low += %(weyl0)du, high += %(weyl1)du)
        for (int k = 0; k < LANES; k++) {
            const uint64_t of_a = (uint64_t)a[k] * %(multiplier0)du;
            const uint64_t of_c = (uint64_t)c[k] * %(multiplier1)du;
            a[k] = (uint32_t)(of_c >> 32) ^ b[k] ^ low;
            b[k] = (uint32_t)of_c;
            c[k] = (uint32_t)(of_a >> 32) ^ d[k] ^ high;
            d[k] = (uint32_t)of_a;
        }
    for (int k = 0; k < LANES; k++) {
        words[0][k] = a[k];
        words[1][k] = b[k];
        words[2][k] = c[k];
        words[3][k] = d[k];
    }
}

/* The distance of E2M1's numbers at a magnitude of up to 8. */
static inline float step_at(float size)
{
    const int32_t exponent = std::min(std::max(bits(size) >> 23, 127), 129);
    return number((exponent - 1) << 23);
}

/* The FP4 code of a number, saturated; rounded by a byte, or to the nearest code. */
template <bool RANDOM> static inline int32_t fp4(float x, int32_t byte)
{
    x = x > 6.0f ? 6.0f : x < -6.0f ? -6.0f : x;
    const int32_t all = bits(x);
    const float size = number(all & 0x7FFFFFFF), step = step_at(size);
    float kept;
    if (RANDOM) {
        const float raised = size + (float)byte * (1.0f / 256) * step;
        const float own = step_at(raised);
        kept = std::min(std::floor(raised / own) * own, 6.0f);
    } else {
        kept = (size + step * 8388608.0f) - step * 8388608.0f;
    }
    const int32_t code = kept < 2.0f ? (int32_t)(kept * 2) : (bits(kept) >> 22) - 252;
    return size == size ? code | ((all >> 28) & 8) : 7;
}

template <bool RANDOM, class T>
static void write_fp4(const T *x, int64_t rows, int64_t columns, int64_t height, int64_t width,
                      const float *factors, const Draw &draw, uint8_t *values, int threads)
{
    #pragma omp parallel num_threads(threads) if (rows * columns >= %(parallel)d)
    {
        std::vector<float> buffer(columns);
        #pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const float *row = floats(x + r * columns, columns, buffer.data());
            const float *factor = factors + r / height * (columns / width);
            uint8_t *out = values + r * (columns / 2);
            for (int64_t c = 0; c < columns; c += 16 * LANES) {
                uint32_t words[4][LANES];
                if (RANDOM) philox(draw, (r * columns + c) / 16, words);
                for (int k = 0; k < LANES && c + 16 * k < columns; k++) {
                    const float by = factor[(c + 16 * k) / width], *group = row + c + 16 * k;
                    int32_t code[16], byte[16];
                    for (int i = 0; i < 16; i++)
                        byte[i] = RANDOM ? words[i / 4][k] >> 8 * (i %% 4) & 0xFF : 0;
                    for (int i = 0; i < 16; i++) code[i] = fp4<RANDOM>(group[i] * by, byte[i]);
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

/* Write the transpose `[columns, padded]`, with a Hadamard transform of each 16 numbers in rows. */
extern "C" void transform(const void *x, int type, int64_t rows, int64_t columns, int64_t padded,
                          const float *signs, uint16_t *values, int threads)
{
    constexpr int64_t WIDE = 64;
    of_type(type, x, [&](auto *of_type) {
        #pragma omp parallel for collapse(2) num_threads(threads) if (rows * columns >= %(parallel)d)
        for (int64_t m = 0; m < padded; m += 16)
            for (int64_t k = 0; k < columns; k += WIDE) {
                float tile[16][WIDE], buffer[WIDE], zeros[WIDE] = {};
                const int64_t n = std::min(WIDE, columns - k);
                for (int64_t i = 0; i < 16; i++) {
                    const float *row = zeros;
                    if (m + i < rows) row = floats(of_type + (m + i) * columns + k, n, buffer);
                    for (int64_t j = 0; j < n; j++) tile[i][j] = row[j] * signs[i];
                    for (int64_t j = n; j < WIDE; j++) tile[i][j] = 0;
                }
                for (int half = 1; half < 16; half *= 2)
                    for (int i = 0; i < 16; i++) {
                        if (i & half) continue;
                        for (int64_t j = 0; j < WIDE; j++) {
                            const float a = tile[i][j], b = tile[i + half][j];
                            tile[i][j] = a + b;
                            tile[i + half][j] = a - b;
                        }
                    }
                for (int64_t j = 0; j < n; j++)
                    for (int i = 0; i < 16; i++)
                        values[(k + j) * padded + m + i] = bfloat16(tile[i][j] * 0.25f);
            }
    });
}

/* Write values times their scales as float32. A table has the numbers of bytes, or of half bytes. */
extern "C" void decode(const uint8_t *values, int is_fp4, const float *table, int64_t rows,
                       int64_t columns, int64_t height, int64_t width, const float *scales,
                       float *decoded, int threads)
{
    #pragma omp parallel for num_threads(threads) if (rows * columns >= %(parallel)d)
    for (int64_t r = 0; r < rows; r++) {
        const float *scale = scales + r / height * (columns / width);
        float *out = decoded + r * columns;
        for (int64_t c = 0; c < columns; c += width, scale++) {
            const float by = *scale;
            if (is_fp4) {
                const uint8_t *bytes = values + (r * columns + c) / 2;
                for (int64_t i = 0; i < width / 2; i++) {
                    out[c + 2 * i] = table[bytes[i] & 15] * by;
                    out[c + 2 * i + 1] = table[bytes[i] >> 4] * by;
                }
            } else {
                const uint8_t *bytes = values + r * columns + c;
                for (int64_t i = 0; i < width; i++) out[c + i] = table[bytes[i]] * by;
            }
        }
    }
}
"""


@functools.cache
def _library() -> Any:
    """Return the passes; if they cannot be compiled, log why and return None."""
    numbers = {"parallel": PARALLEL, "rounds": ROUNDS}
    numbers |= {f"weyl{i}": word for i, word in enumerate(WEYL)}
    numbers |= {f"multiplier{i}": word for i, word in enumerate(MULTIPLIERS)}
    types = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int}
    try:
        library = load(_SOURCE % numbers, "quantization to FP8 and FP4")
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [types[each] for each in signature], None
    except Exception as error:  # from the compiler, the folder, or this release of torch
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        logger.warning("quantization could not be compiled, so eager torch runs it, slower: %s", reason)
        return None
    return library


def take(*tensors: Tensor, backend: str | None = None) -> bool:
    """Whether these passes take tensors: on the CPU, with values, contiguous, not in compiled code.

    Where a mode watches operations, as that of a diagnosis does, eager torch runs them.
    """
    if torch.compiler.is_compiling() or requested(backend)[0]:
        return False
    if _get_current_dispatch_mode() is not None:
        return False
    for each in tensors:
        if type(each) not in (Tensor, torch.nn.Parameter) or each.device.type != "cpu":
            return False
        if not each.is_contiguous() or not each.numel():
            return False
    is_known = _library.cache_info().currsize > 0
    is_worth_it = max(each.numel() for each in tensors) >= WORTH_COMPILING
    return (is_known or is_worth_it) and _library() is not None


def _sides(x: Tensor, counts: tuple[int, int], columns: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of a matrix, and the height and width of its blocks."""
    return len(x), columns, len(x) // counts[0], columns // counts[1]


def amax_of(x: Tensor, counts: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each of `counts` blocks, float32; inf where one is inf or NaN."""
    rows, columns, height, width = _sides(x, counts, x.shape[1])
    largest = torch.empty(rows, counts[1], dtype=torch.float32, device="cpu")
    _library().amaxes(
        x.data_ptr(), _TYPES[x.dtype], rows, columns, width, largest.data_ptr(), _threads()
    )
    return largest if height == 1 else largest.view(counts[0], height, counts[1]).amax(1)


def to_fp8(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in FP8, times the float32 factors `[down, across]` of its blocks."""
    factors = factors.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device="cpu")
    sides = _sides(x, (factors.shape[0], factors.shape[1]), x.shape[1])
    is_e4m3 = dtype is torch.float8_e4m3fn
    _library().to_fp8(
        x.data_ptr(),
        _TYPES[x.dtype],
        *sides,
        factors.data_ptr(),
        is_e4m3,
        values.data_ptr(),
        _threads(),
    )
    return values


def to_fp4(x: Tensor, factors: Tensor, draw: Draw | None) -> Tensor:
    """Return a matrix in FP4, uint8 `[R, C / 2]`, times the factors `[down, across]` of its blocks."""
    factors = factors.contiguous()
    values = torch.empty(len(x), x.shape[1] // 2, dtype=torch.uint8, device="cpu")
    sides = _sides(x, (factors.shape[0], factors.shape[1]), x.shape[1])
    of_draw: tuple[int | None, int, int, int] = (None, 0, 0, 0)
    if draw is not None:
        of_draw = (draw.calls.data_ptr(), draw.seed, draw.name, draw.last_word)
    _library().to_fp4(
        x.data_ptr(),
        _TYPES[x.dtype],
        *sides,
        factors.data_ptr(),
        *of_draw,
        values.data_ptr(),
        _threads(),
    )
    return values


def transformed(x: Tensor, padded: int, signs: tuple[int, ...]) -> Tensor:
    """Return the transpose `[K, padded]` with the Hadamard transform of each 16 numbers, bfloat16."""
    values = torch.empty(x.shape[1], padded, dtype=torch.bfloat16, device="cpu")
    _library().transform(
        x.data_ptr(),
        _TYPES[x.dtype],
        *x.shape,
        padded,
        (ctypes.c_float * 16)(*signs),
        values.data_ptr(),
        _threads(),
    )
    return values


def decoded(values: Tensor, table: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return values times the float32 scales `[down, across]` of their blocks, float32 `[R, C]`.

    Args:
        values: FP8, or uint8 with two values each.
        table: float32, the numbers of the 256 bytes of FP8, or of the 16 codes of FP4.
        scales: float32 `[down, across]`.
        columns: of the result.
    """
    scales = scales.contiguous()
    result = torch.empty(len(values), columns, dtype=torch.float32, device="cpu")
    sides = _sides(values, (scales.shape[0], scales.shape[1]), columns)
    _library().decode(
        values.data_ptr(),
        len(table) == 16,
        table.data_ptr(),
        *sides,
        scales.data_ptr(),
        result.data_ptr(),
        _threads(),
    )
    return result


def _threads() -> int:
    return torch.get_num_threads()
