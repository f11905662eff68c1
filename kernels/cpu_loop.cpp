/* The loop of cpu_loop.py over the elements of tensors, which defines these macros before it:

   REAMP_PARALLEL   the number of elements from which a tensor is divided among threads
   REAMP_STREAMS    how many tensors go together: a parameter, its gradient, its moments, ...
   REAMP_COLUMNS    the length of a row, see `run`
   REAMP_NUMBERS    the number of hyper-parameters
   REAMP_BODY       the formula: reads vectors from the streams, and writes them */

#include <ATen/cpu/vec/vec.h>
#include <cstring>
#include <type_traits>
using namespace at::vec;
using Floats = VectorizedN<float, 2>;  // as many numbers as there are in one vector of 16-bit floats
using Ints = VectorizedN<int32_t, 2>;
constexpr int64_t WIDTH = Floats::size();

template <class T> static inline Floats read(const T *memory, int64_t n)
{
    constexpr int vectors = sizeof(T) / 2;
    return convert<float, 2, T, vectors>(VectorizedN<T, vectors>::loadu(memory, n));
}

template <class T> static inline void write(const Floats &x, T *memory, int64_t n)
{
    convert<T, sizeof(T) / 2, float, 2>(x).store(memory, n);
}

/* Whether 16-bit parameters are the rounded masters. */
template <class T> static inline Floats agree(const Floats &ours, const Floats &theirs)
{
    return convert<float, 2, T, 1>(convert<T, 1, float, 2>(ours)) == theirs;
}

/* Masters, but the values of their parameters where these do not agree. */
template <class T> static inline Floats merged(const Floats &ours, const Floats &theirs)
{
    return Floats::blendv(theirs, ours, agree<T>(ours, theirs));
}

/* See rule.py. All elements of the factor are the same, and a branch that they all take costs nothing. */
static inline Floats plus_product(const Floats &x, const Floats &factor, const Floats &y)
{
    float first;
    std::memcpy(&first, &factor, sizeof first);
    return first == 0 ? x : x + factor * y;
}

/* Vectors of a compiler, which it converts in registers. */
template <class T, int64_t N> using Vector [[gnu::vector_size(sizeof(T) * N)]] = T;
constexpr int64_t HALF = WIDTH / 2;

static inline Ints read_bits(const int16_t *memory, int64_t n)
{
    int16_t some[WIDTH];
    if (n < WIDTH) memory = static_cast<int16_t *>(std::memcpy(some, memory, n * sizeof *memory));
    Ints result;
    for (int k = 0; k < 2; k++) {
        Vector<int16_t, HALF> narrow;
        std::memcpy(&narrow, memory + k * HALF, sizeof narrow);
        const auto wide = __builtin_convertvector(narrow, Vector<int32_t, HALF>);
        result[k] = Vectorized<int32_t>::loadu(&wide);
    }
    return result;
}

static inline Ints read_bits(const int8_t *memory, int64_t n)
{
    Vector<int8_t, WIDTH> narrow;
    if (n < WIDTH) std::memcpy(&narrow, memory, n);
    else std::memcpy(&narrow, memory, sizeof narrow);
    const auto wide = __builtin_convertvector(narrow, Vector<int16_t, WIDTH>);
    return read_bits(reinterpret_cast<const int16_t *>(&wide), WIDTH);
}

template <class T> static inline void write(const Ints &x, T *memory, int64_t n)
{
    using Integer = std::conditional_t<sizeof(T) == 1, int8_t, int16_t>;
    Integer some[WIDTH], *to = n < WIDTH ? some : reinterpret_cast<Integer *>(memory);
    for (int k = 0; k < 2; k++) {
        Vector<int32_t, HALF> wide;
        x[k].store(&wide);
        const auto narrow = __builtin_convertvector(wide, Vector<int16_t, HALF>);
        const auto last = __builtin_convertvector(narrow, Vector<Integer, HALF>);
        std::memcpy(to + k * HALF, &last, sizeof last);
    }
    if (n < WIDTH) std::memcpy(memory, some, n * sizeof(T));
}

/* Shifts by a number that the compiler knows. */
template <class F> static inline Ints on_halves(const Ints &x, F shift)
{
    Ints result;
    for (int k = 0; k < 2; k++) {
        Vector<int32_t, HALF> half;
        x[k].store(&half);
        half = shift(half);
        result[k] = Vectorized<int32_t>::loadu(&half);
    }
    return result;
}

static inline Ints operator<<(const Ints &x, int n)
{
    return on_halves(x, [n](auto half) { return half << n; });
}

static inline Ints operator>>(const Ints &x, int n)
{
    return on_halves(x, [n](auto half) { return half >> n; });
}

static inline Ints bits(const Floats &x) { return {cast<int32_t>(x[0]), cast<int32_t>(x[1])}; }
static inline Floats number(const Ints &x) { return {cast<float>(x[0]), cast<float>(x[1])}; }
static inline Floats real(const Ints &x) { return convert<float, 2, int32_t, 2>(x); }
static inline Ints whole(const Floats &x) { return convert<int32_t, 2, float, 2>(x); }
static inline Ints if_less(const Ints &x, const Ints &y, const Ints &one, const Ints &other)
{
    return Ints::blendv(other, one, x < y);
}

static inline Ints if_number(const Ints &one, const Floats &x, const Ints &other)
{
    const Floats is_number = x == x;
    return Ints::blendv(other, one, bits(is_number));
}

/* The lower halves of the indices of elements in the whole tensor; see Origin. */
static inline Ints index_of(const int64_t *origin, int64_t i)
{
    const int64_t first = origin[1], run = origin[2], pitch = origin[3];
    if (!run) return Ints((int32_t)(first + i)) + Ints::arange(0, 1);
    int32_t indices[WIDTH];
    for (int64_t k = i; k < i + WIDTH; k++)
        indices[k - i] = (int32_t)(first + k / run * pitch + k % run);
    return Ints::loadu(indices);
}

/* Process n elements of a tensor from i on, a vector of them or fewer. */
C10_ALWAYS_INLINE static void on_vector(const int64_t *row, int64_t i, int64_t n, const Floats *numbers)
{
    REAMP_BODY
}

/* A row has the addresses and the size of a tensor, and then what else the body reads. They are given
   column by column. */
extern "C" void run(const int64_t *columns, int64_t tensors, const float *numbers, int threads)
{
    Floats vectors[REAMP_NUMBERS + 1];  // never of no length
    for (int k = 0; k < REAMP_NUMBERS; k++) vectors[k] = Floats(numbers[k]);
    for (int64_t i = 0; i < tensors; i++) {
        int64_t row[REAMP_COLUMNS];
        for (int k = 0; k < REAMP_COLUMNS; k++) row[k] = columns[k * tensors + i];
        const int64_t size = row[REAMP_STREAMS], tail = size % WIDTH;
        #pragma omp parallel for num_threads(threads) if (size >= REAMP_PARALLEL)
        for (int64_t first = 0; first < size - tail; first += WIDTH) on_vector(row, first, WIDTH, vectors);
        if (tail) on_vector(row, size - tail, tail, vectors);
    }
}
