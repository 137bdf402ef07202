// Element-wise reduction of several vectors in one pass, on a GPU.
//
//     into[0][i] = into[1][i] = finish(source[0][i] (+) source[1][i] (+) ... )
//
// from left to right, in the type `Work`: 16- and 8-bit floats are thus added up in float32 and
// rounded once, for any number of sources. Sources and results may each have a type of their own
// (a "wire" type), and the kernel may write a second result as well: so receiving, reducing,
// copying and sending need a single pass over memory.
//
// Such a kernel only waits for memory, and its speed depends on how it asks for memory
// (V. Volkov, "Understanding Latency Hiding on GPUs", UC Berkeley 2016): in accesses of 16
// bytes a thread, by neighbouring threads next to each other, several accesses under way
// before the first is used.
//
//     vector:   | head |  pack  |  pack  |  pack  | ...  |  pack  | tail |
//     bytes:      < 16    16       16       16              16      < 16
//
// Heads and tails are reduced element by element. If the vectors are not aligned alike, no head
// aligns all of them; then a pack is read in shorter runs, at worst of one element, of which
// neighbouring threads take neighbours.
// Python chooses head and run (gpu.py), and adds a kernel that calls `reduce`.
//
// No header is included, so that any compiler can compile this file: NVRTC, nvcc, and a C++
// compiler for tests on a machine without a GPU. The tests define what is built into CUDA.

namespace ringcoll {

typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;

// ---- Arithmetic ---------------------------------------------------------------------------

template <class T> __device__ inline T plus(T left, T right) { return left + right; }
template <class T> __device__ inline T minus(T left, T right) { return left - right; }
template <class T> __device__ inline T times(T left, T right) { return left * right; }
template <class T> __device__ inline T over(T left, T right) { return left / right; }
template <class T> __device__ inline bool less(T left, T right) { return left < right; }

#ifdef __CUDA_ARCH__
// CuPy always compiles with -ftz=true (cupy/cuda/compiler.py), which takes float32 numbers
// below the normal range for zero. The assembler's own instructions do not.
#define RINGCOLL_FLOAT32(NAME, INSTRUCTION)                                             \
    __device__ inline float32 NAME(float32 left, float32 right) {                       \
        float32 result;                                                                 \
        asm(INSTRUCTION " %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));         \
        return result;                                                                  \
    }
RINGCOLL_FLOAT32(plus, "add.rn.f32")
RINGCOLL_FLOAT32(minus, "sub.rn.f32")
RINGCOLL_FLOAT32(times, "mul.rn.f32")
RINGCOLL_FLOAT32(over, "div.rn.f32")

__device__ inline bool less(float32 left, float32 right) {
    uint32 result;
    asm("{ .reg .pred is; setp.lt.f32 is, %1, %2; selp.u32 %0, 1, 0, is; }"
        : "=r"(result)
        : "f"(left), "f"(right));
    return result;
}
#endif

// ---- Types that C++ does not have, by their bits ------------------------------------------

struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };
struct float8_e4m3fn { uint8 bits; };
struct float8_e5m2 { uint8 bits; };

template <class T>
struct alignas(2 * sizeof(T)) Complex { T real, imag; };
typedef Complex<float> complex64;
typedef Complex<double> complex128;

__device__ inline uint32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float as_float(uint32 bits) { return __uint_as_float(bits); }

// A 16-bit float of IEEE 754, which every GPU converts in hardware.
__device__ inline float widen(float16 value) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#else
    return host_half_to_float(value.bits);
#endif
}

__device__ inline void narrow(float value, float16& into) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(into.bits) : "f"(value));
#else
    into.bits = host_float_to_half(value);
#endif
}

// The upper half of a float32.
__device__ inline float widen(bfloat16 value) { return as_float((uint32)value.bits << 16); }

__device__ inline void narrow(float value, bfloat16& into) {
    uint32 bits = bits_of(value);
    // To the nearest, halves to even; a NaN must not be carried over into infinity.
    uint32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    into.bits = value != value ? 0x7FC0 : (uint16)rounded;
}

// The upper half of a float16.
__device__ inline float widen(float8_e5m2 value) {
    float16 half = {(uint16)(value.bits << 8)};
    return widen(half);
}

// The exponent has a bit less than in a float16, and a bias less by 8; no infinity, one NaN.
__device__ inline float widen(float8_e4m3fn value) {
    uint32 magnitude = value.bits & 0x7F;
    float16 half = {(uint16)((value.bits & 0x80) << 8 | magnitude << 7)};
    return magnitude == 0x7F ? as_float(0x7FC00000) : times(widen(half), 256.0f);
}

// Round the magnitude of a float32 to MANTISSA bits, with an exponent of the given BIAS.
template <int MANTISSA, int BIAS>
__device__ inline uint32 rounded(uint32 magnitude) {
    const int dropped = 23 - MANTISSA;
    const uint32 smallest_normal = (uint32)(127 - BIAS + 1) << 23;
    // Below the normal range all steps are equal: to add a number whose last bit is such a step
    // rounds to a multiple of the step.
    const uint32 magic = (uint32)(127 - BIAS + 1 + dropped) << 23;
    uint32 subnormal = bits_of(plus(as_float(magnitude), as_float(magic))) - magic;
    uint32 carried = magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1);
    uint32 normal = (carried >> dropped) - ((uint32)(127 - BIAS) << MANTISSA);
    return magnitude < smallest_normal ? subnormal : normal;
}

// There is no infinity. A number that is too large becomes NaN in some versions of torch, and the
// largest number in others: Python says which.
__device__ inline void narrow(float value, float8_e4m3fn& into) {
    uint32 magnitude = bits_of(value) & 0x7FFFFFFF, sign = bits_of(value) >> 31 << 7;
    const uint32 infinity = 0x7F800000;
    const uint32 largest = 0x43E80000;  // 464: the middle between 448, the last, and 480
    uint32 large = magnitude > infinity ? 0x7F : RINGCOLL_LARGE_E4M3;
    into.bits = (uint8)(sign | (magnitude > largest ? large : rounded<3, 7>(magnitude)));
}

__device__ inline void narrow(float value, float8_e5m2& into) {
    uint32 magnitude = bits_of(value) & 0x7FFFFFFF, sign = bits_of(value) >> 31 << 7;
    const uint32 infinity = 0x7F800000;
    const uint32 too_large = 0x47700000;  // 61440: the middle between 57344 and infinity
    uint32 large = magnitude > infinity ? 0x7F : 0x7C;
    into.bits = (uint8)(sign | (magnitude >= too_large ? large : rounded<2, 15>(magnitude)));
}

// ---- Conversion between the stored type and the type of the computation -------------------

template <class Into, class From>
struct Convert {
    static __device__ inline Into from(From value) { return (Into)value; }
};

template <class T>
struct Convert<T, T> {
    static __device__ inline T from(T value) { return value; }
};

#ifdef __CUDA_ARCH__  // see above
template <>
struct Convert<float64, float32> {
    static __device__ inline float64 from(float32 value) {
        float64 result;
        asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
        return result;
    }
};

template <>
struct Convert<float32, float64> {
    static __device__ inline float32 from(float64 value) {
        float32 result;
        asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
        return result;
    }
};
#endif

template <class Into, class From>
struct Convert<Complex<Into>, Complex<From>> {
    static __device__ inline Complex<Into> from(Complex<From> value) {
        Complex<Into> result = {Convert<Into, From>::from(value.real),
                                Convert<Into, From>::from(value.imag)};
        return result;
    }
};

template <class T>
struct Convert<Complex<T>, Complex<T>> {
    static __device__ inline Complex<T> from(Complex<T> value) { return value; }
};

// By way of float32, which holds every value of the narrow types.
#define RINGCOLL_NARROW(TYPE)                                                           \
    template <class Into>                                                               \
    struct Convert<Into, TYPE> {                                                        \
        static __device__ inline Into from(TYPE value) {                                \
            return Convert<Into, float32>::from(widen(value));                          \
        }                                                                               \
    };                                                                                  \
    template <class From>                                                               \
    struct Convert<TYPE, From> {                                                        \
        static __device__ inline TYPE from(From value) {                                \
            TYPE result;                                                                \
            narrow(Convert<float32, From>::from(value), result);                        \
            return result;                                                              \
        }                                                                               \
    };                                                                                  \
    template <>                                                                         \
    struct Convert<TYPE, TYPE> {                                                        \
        static __device__ inline TYPE from(TYPE value) { return value; }                \
    };

RINGCOLL_NARROW(float16)
RINGCOLL_NARROW(bfloat16)
RINGCOLL_NARROW(float8_e4m3fn)
RINGCOLL_NARROW(float8_e5m2)

// ---- Two neighbours at a time -------------------------------------------------------------
//
// GPUs have instructions that convert two numbers: to 16-bit floats from sm_80 on, from and to 8-bit
// floats from sm_89 on (PTX ISA 8.8, `cvt`). The second operand becomes the lower half.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define RINGCOLL_CONVERTS_TO_16_BITS
__device__ inline uint32 float16_pair(float upper, float lower) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}
__device__ inline uint32 bfloat16_pair(float upper, float lower) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define RINGCOLL_CONVERTS_8_BITS
__device__ inline uint16 e4m3_pair(float upper, float lower) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(upper), "f"(lower));
    return pair;
}
__device__ inline uint16 e5m2_pair(float upper, float lower) {
    uint16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(upper), "f"(lower));
    return pair;
}
__device__ inline uint32 float16_pair_of_e4m3(uint16 pair) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
__device__ inline uint32 float16_pair_of_e5m2(uint16 pair) {
    uint32 halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
#endif

template <class Into, class From>
__device__ inline void convert_pair(const From* from, Into* into) {
    into[0] = Convert<Into, From>::from(from[0]);
    into[1] = Convert<Into, From>::from(from[1]);
}

#ifdef RINGCOLL_CONVERTS_TO_16_BITS
__device__ inline void convert_pair(const float32* from, float16* into) {
    uint32 pair = float16_pair(from[1], from[0]);
    memcpy(into, &pair, 4);
}
__device__ inline void convert_pair(const float32* from, bfloat16* into) {
    uint32 pair = bfloat16_pair(from[1], from[0]);
    memcpy(into, &pair, 4);
}
#endif

#ifdef RINGCOLL_CONVERTS_8_BITS
__device__ inline void widen_pair(uint32 halves, float32* into) {
    float16 lower = {(uint16)halves}, upper = {(uint16)(halves >> 16)};
    into[0] = widen(lower);
    into[1] = widen(upper);
}
__device__ inline void convert_pair(const float8_e4m3fn* from, float32* into) {
    uint16 pair;
    memcpy(&pair, from, 2);
    widen_pair(float16_pair_of_e4m3(pair), into);
}
__device__ inline void convert_pair(const float8_e5m2* from, float32* into) {
    uint16 pair;
    memcpy(&pair, from, 2);
    widen_pair(float16_pair_of_e5m2(pair), into);
}
// The instructions take the largest number for what is too large. The next pattern of bits is what
// torch has: NaN, or infinity.
__device__ inline void convert_pair(const float32* from, float8_e4m3fn* into) {
    uint16 pair = e4m3_pair(from[1], from[0]);
    if (RINGCOLL_LARGE_E4M3 == 0x7F)
        pair += (fabsf(from[0]) > 464.0f ? 1 : 0) + (fabsf(from[1]) > 464.0f ? 0x100 : 0);
    memcpy(into, &pair, 2);
}
__device__ inline void convert_pair(const float32* from, float8_e5m2* into) {
    uint16 pair = e5m2_pair(from[1], from[0]);
    pair += (fabsf(from[0]) >= 61440.0f ? 1 : 0) + (fabsf(from[1]) >= 61440.0f ? 0x100 : 0);
    memcpy(into, &pair, 2);
}
#endif

template <int NUMEL, class Into, class From>
__device__ inline void convert(const From* from, Into* into) {
#pragma unroll
    for (int i = 0; i + 1 < NUMEL; i += 2) convert_pair(from + i, into + i);
    if (NUMEL % 2) into[NUMEL - 1] = Convert<Into, From>::from(from[NUMEL - 1]);
}

// ---- Operators ----------------------------------------------------------------------------

// Integers wrap around. In C++ only unsigned integers do, and none of them is narrower than an int.
template <class T> struct Wrapping { typedef T type; };
template <> struct Wrapping<int8> { typedef uint32 type; };
template <> struct Wrapping<int16> { typedef uint32 type; };
template <> struct Wrapping<int32> { typedef uint32 type; };
template <> struct Wrapping<int64> { typedef uint64 type; };
template <> struct Wrapping<uint8> { typedef uint32 type; };
template <> struct Wrapping<uint16> { typedef uint32 type; };

struct Sum {
    template <class T>
    static __device__ inline T apply(T left, T right) {
        typedef typename Wrapping<T>::type Wide;
        return (T)plus((Wide)left, (Wide)right);
    }
    template <class T>
    static __device__ inline Complex<T> apply(Complex<T> left, Complex<T> right) {
        Complex<T> result = {plus(left.real, right.real), plus(left.imag, right.imag)};
        return result;
    }
};

struct Product {
    template <class T>
    static __device__ inline T apply(T left, T right) {
        typedef typename Wrapping<T>::type Wide;
        return (T)times((Wide)left, (Wide)right);
    }
    template <class T>
    static __device__ inline Complex<T> apply(Complex<T> left, Complex<T> right) {
        Complex<T> result = {minus(times(left.real, right.real), times(left.imag, right.imag)),
                             plus(times(left.real, right.imag), times(left.imag, right.real))};
        return result;
    }
};

// As in torch.minimum and torch.maximum a NaN stays a NaN. A NaN on the left is neither more nor
// less than the right operand.
struct Min {
    template <class T>
    static __device__ inline T apply(T left, T right) {
        return right != right || less(right, left) ? right : left;
    }
};

struct Max {
    template <class T>
    static __device__ inline T apply(T left, T right) {
        return right != right || less(left, right) ? right : left;
    }
};

struct Band {
    template <class T>
    static __device__ inline T apply(T left, T right) { return (T)(left & right); }
};

struct Bor {
    template <class T>
    static __device__ inline T apply(T left, T right) { return (T)(left | right); }
};

struct Bxor {
    template <class T>
    static __device__ inline T apply(T left, T right) { return (T)(left ^ right); }
};

// ---- Last operations on the total ---------------------------------------------------------

struct Plain {
    template <class T>
    static __device__ inline T apply(T total, double, double) { return total; }
};

// The division of AVG. Integers are divided without remainder, towards zero.
struct Divide {
    template <class T>
    static __device__ inline T apply(T total, double by, double) {
        return (T)over(total, Convert<T, double>::from(by));
    }
    static __device__ inline uint64 apply(uint64 total, double by, double) {
        return total / (uint64)by;
    }
    // The number of ranks may be outside of the type's range.
    static __device__ inline int8 apply(int8 total, double by, double) { return total / (int32)by; }
    static __device__ inline uint8 apply(uint8 total, double by, double) { return total / (int32)by; }
    static __device__ inline int16 apply(int16 total, double by, double) { return total / (int32)by; }
    static __device__ inline uint16 apply(uint16 total, double by, double) {
        return total / (int32)by;
    }
    template <class T>
    static __device__ inline Complex<T> apply(Complex<T> total, double by, double) {
        T number = Convert<T, double>::from(by);
        Complex<T> result = {over(total.real, number), over(total.imag, number)};
        return result;
    }
};

// The real factor of PREMUL_SUM.
struct Scale {
    template <class T>
    static __device__ inline T apply(T total, double real, double) {
        return times(total, Convert<T, double>::from(real));
    }
    template <class T>
    static __device__ inline Complex<T> apply(Complex<T> total, double real, double) {
        T factor = Convert<T, double>::from(real);
        Complex<T> result = {times(total.real, factor), times(total.imag, factor)};
        return result;
    }
};

// The complex factor of PREMUL_SUM.
struct Multiply {
    template <class T>
    static __device__ inline Complex<T> apply(Complex<T> total, double real, double imag) {
        Complex<T> factor = {Convert<T, double>::from(real), Convert<T, double>::from(imag)};
        return Product::apply(total, factor);
    }
};

// ---- Packs: elements that a thread moves at a time ----------------------------------------

// An access of so many bytes, in assembler: from C++ the compiler would split wide stores into
// narrow stores, and move loads to the place of their first use.
template <int NBYTES>
struct Access {  // of 1 or 2 bytes
    template <class Run>
    static __device__ inline void load(Run& into, const void* from) { into = *(const Run*)from; }
    template <class Run>
    static __device__ inline void store(const Run& from, void* into) { *(Run*)into = from; }
};

#ifdef __CUDA_ARCH__
template <>
struct Access<4> {
    template <class Run>
    static __device__ inline void load(Run& into, const void* from) {
        uint32 word;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(__cvta_generic_to_global(from)));
        memcpy(&into, &word, 4);
    }
    template <class Run>
    static __device__ inline void store(const Run& from, void* into) {
        uint32 word;
        memcpy(&word, &from, 4);
        asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(into)), "r"(word));
    }
};

template <>
struct Access<8> {
    template <class Run>
    static __device__ inline void load(Run& into, const void* from) {
        uint32 word[2];
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(word[0]), "=r"(word[1])
                     : "l"(__cvta_generic_to_global(from)));
        memcpy(&into, word, 8);
    }
    template <class Run>
    static __device__ inline void store(const Run& from, void* into) {
        uint32 word[2];
        memcpy(word, &from, 8);
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(into)),
                     "r"(word[0]), "r"(word[1]));
    }
};

template <>
struct Access<16> {
    template <class Run>
    static __device__ inline void load(Run& into, const void* from) {
        uint32 word[4];
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(__cvta_generic_to_global(from)));
        memcpy(&into, word, 16);
    }
    template <class Run>
    static __device__ inline void store(const Run& from, void* into) {
        uint32 word[4];
        memcpy(word, &from, 16);
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                         __cvta_generic_to_global(into)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]));
    }
};
#endif

template <class T, int RUN>
struct alignas(RUN * sizeof(T)) Run { T value[RUN]; };

// NUMEL elements in a thread's registers, in accesses of RUN elements, which are `stride` apart.
template <class T, int NUMEL, int RUN>
struct Pack {
    typedef Access<RUN * sizeof(T)> Memory;
    T value[NUMEL];

    __device__ inline void load(const T* from, int64 stride) {
#pragma unroll
        for (int i = 0; i < NUMEL / RUN; ++i) {
            Run<T, RUN> run;
            Memory::load(run, from + i * stride);
            memcpy(value + i * RUN, &run, sizeof run);
        }
    }
    __device__ inline void store(T* into, int64 stride) const {
#pragma unroll
        for (int i = 0; i < NUMEL / RUN; ++i) {
            Run<T, RUN> run;
            memcpy(&run, value + i * RUN, sizeof run);
            Memory::store(run, into + i * stride);
        }
    }
};

// ---- The reduction ------------------------------------------------------------------------

// A kernel's types and sizes. First: type of the first source. Rest: type of all other sources.
// Into, Copy: types of the two results. Rounded: type to which the total is rounded before it is
// stored, so that a result and its copy in a narrower type are equal.
template <class Op_, class Finish_, class Work_, class First_, class Rest_, class Into_,
          class Copy_, class Rounded_, int SOURCES_, int RESULTS_, int PACK_, int RUN_,
          int UNROLL_, int THREADS_>
struct Kernel {
    typedef Op_ Op;
    typedef Finish_ Finish;
    typedef Work_ Work;
    typedef First_ First;
    typedef Rest_ Rest;
    typedef Into_ Into;
    typedef Copy_ Copy;
    typedef Rounded_ Rounded;
    static const int SOURCES = SOURCES_, RESULTS = RESULTS_, PACK = PACK_, RUN = RUN_,
                     UNROLL = UNROLL_, THREADS = THREADS_;
};

template <class K>
struct Arguments {
    const void* source[K::SOURCES];
    void* into[K::RESULTS];
    int64 numel;
    int64 head;            // elements before the first pack, fewer than a pack has
    double real, imag;     // of Finish
};

// The operands of NUMEL elements, in the registers of a thread. Neighbouring threads have
// neighbouring runs: so a warp's access is to one piece of memory, however short the runs are.
template <class K, int NUMEL, int RUN>
struct Loaded {
    static const int STRIDE = K::THREADS * RUN;
    Pack<typename K::First, NUMEL, RUN> first;
    Pack<typename K::Rest, NUMEL, RUN> rest[K::SOURCES > 1 ? K::SOURCES - 1 : 1];

    __device__ inline void load(const Arguments<K>& a, int64 at) {
        first.load((const typename K::First*)a.source[0] + at, STRIDE);
#pragma unroll
        for (int s = 1; s < K::SOURCES; ++s)
            rest[s - 1].load((const typename K::Rest*)a.source[s] + at, STRIDE);
    }

    __device__ inline void store(const Arguments<K>& a, int64 at) const {
        typename K::Work total[NUMEL], other[NUMEL];
        convert<NUMEL>(first.value, total);
#pragma unroll
        for (int s = 1; s < K::SOURCES; ++s) {
            convert<NUMEL>(rest[s - 1].value, other);
#pragma unroll
            for (int i = 0; i < NUMEL; ++i) total[i] = K::Op::apply(total[i], other[i]);
        }
#pragma unroll
        for (int i = 0; i < NUMEL; ++i) total[i] = K::Finish::apply(total[i], a.real, a.imag);
        typename K::Rounded rounded[NUMEL];
        convert<NUMEL>(total, rounded);
        convert<NUMEL>(rounded, total);
        Pack<typename K::Into, NUMEL, RUN> into;
        convert<NUMEL>(total, into.value);
        into.store((typename K::Into*)a.into[0] + at, STRIDE);
        if (K::RESULTS > 1) {
            Pack<typename K::Copy, NUMEL, RUN> copy;
            convert<NUMEL>(total, copy.value);
            copy.store((typename K::Copy*)a.into[K::RESULTS - 1] + at, STRIDE);
        }
    }
};

// Every block takes tiles of UNROLL packs a thread, until no tile is left.
template <class K>
__device__ inline void reduce(const Arguments<K>& a) {
    const int64 tile = K::THREADS * K::UNROLL * K::PACK, stride = gridDim.x * tile;
    const int64 body = (a.numel - a.head) / K::RUN * K::RUN;  // elements in runs
    const int64 tail = a.numel - a.head - body;
    const int64 mine = a.head + threadIdx.x * K::RUN;
    for (int64 start = blockIdx.x * tile; start < body; start += stride) {
        if (start + tile <= body) {  // no condition in between: all loads go out together
            Loaded<K, K::PACK, K::RUN> loaded[K::UNROLL];
#pragma unroll
            for (int u = 0; u < K::UNROLL; ++u)
                loaded[u].load(a, mine + start + u * K::THREADS * K::PACK);
#pragma unroll
            for (int u = 0; u < K::UNROLL; ++u)
                loaded[u].store(a, mine + start + u * K::THREADS * K::PACK);
        } else {
#pragma unroll 1
            for (int64 at = start + threadIdx.x * K::RUN; at < body; at += K::THREADS * K::RUN) {
                Loaded<K, K::RUN, K::RUN> loaded;
                loaded.load(a, a.head + at);
                loaded.store(a, a.head + at);
            }
        }
    }
    // Head and tail together have fewer elements than two runs, so than a block has threads.
    if (blockIdx.x == 0 && threadIdx.x < a.head + tail) {
        const int64 at = threadIdx.x < a.head ? threadIdx.x : a.numel - tail + threadIdx.x - a.head;
        Loaded<K, 1, 1> one;
        one.load(a, at);
        one.store(a, at);
    }
}

}  // namespace ringcoll
