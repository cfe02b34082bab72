// Executes PTX, as text that was parsed (program.py): a program at a time, warp by warp, 32 lanes to an operation.
//
// It is meant to find what is wrong, so it is as unkind as the model of execution allows: a warp runs until it has to
// wait for others, in either order of warps; what is copied asynchronously arrives when it is waited for and not before;
// shared memory and registers hold garbage at first; and each access has to be aligned, and within memory that the
// kernel was given.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr int LANES = 32;

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// 16-bit floats, rounded to nearest even from float64.

template <int EXPONENT, int MANTISSA>
struct Small {
    u16 raw;
    static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;

    Small() = default;
    Small(f64 value) {
        u16 sign = std::signbit(value) ? 0x8000 : 0;
        f64 size = std::fabs(value);
        constexpr u16 INFINITE = ((1 << EXPONENT) - 1) << MANTISSA;
        if (std::isnan(value)) {
            raw = 0x7fff;
            return;
        }
        int exponent = size == 0 ? 1 - BIAS : std::max(std::ilogb(size), 1 - BIAS);
        if (std::isinf(size) || exponent > BIAS) {
            raw = sign | INFINITE;
            return;
        }
        // A mantissa that is rounded up to the next power of two carries into the exponent, up to infinity.
        u32 units = (u32)std::nearbyint(std::ldexp(size, MANTISSA - exponent));
        raw = sign | (u16)(((exponent + BIAS - 1) << MANTISSA) + units);
    }
    operator f32() const {
        const u32 sign = (u32)(raw & 0x8000) << 16, size = raw & 0x7fff;
        if constexpr (EXPONENT == 8) return bits<f32>((u32)raw << 16);
        // float32's exponents are offset by more; numbers below the normal ones are exact in it.
        if (size >= 0x7c00) return bits<f32>(sign | 0x7f800000 | size << 13);
        const f32 value = bits<f32>(size << 13) * 0x1p112f;
        return bits<f32>(sign | bits<u32>(value));
    }
};

typedef Small<5, 10> f16;
typedef Small<8, 7> bf16;
template <class T>
constexpr bool is_small = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;

template <class T>
struct Pair {
    T low, high;
};

// The machine.

struct Range {
    u64 begin, end;
};

struct Warp;
struct Instruction;
typedef void (*Operation)(Warp &, const Instruction &);

struct Instruction {
    Operation run;
    const s32 *operands;  // places in the registers of a warp, numbers and targets, as the operation reads them
    s32 guard;            // the place of a predicate, or -1
    s32 inverted;
};

struct Access {
    u64 address;
    u32 size;
};

// Of an instruction in all warps. waves: of shared memory, each of 128 bytes, and how many are the least. sectors: of
// 32 bytes of global memory, and how many hold as many bytes.
struct Count {
    s64 executed, waves, least_waves, sectors, least_sectors;
};

struct Block {
    std::vector<u8> shared;
    const u8 *parameters;
    const Range *ranges;
    int num_ranges, last_range;
    bool counts;
    std::vector<Access> of_shared, of_global;  // accesses of the instruction that is executed, in the order of lanes
};

struct Copy {
    u32 target;
    u64 source;
    u32 size, taken;
    int group;
};

struct Warp {
    Block *block;
    std::vector<u8> registers;
    u32 mask, alive, at[LANES];
    u32 held;  // lanes that wait for others before an instruction of the whole warp
    bool diverged, waits;
    u32 next;
    std::vector<Copy> copies;
    int group;

    template <class T>
    T *lanes(s32 place) { return (T *)(registers.data() + place); }
};

[[noreturn]] void fail(const std::string &why) { throw std::runtime_error(why); }

std::string access(const char *memory, u64 address, u64 size) {
    char text[96];
    snprintf(text, sizeof text, "an access to %llu bytes of %s memory at 0x%llx", (unsigned long long)size, memory, (unsigned long long)address);
    return text;
}

template <class F>
void each(Warp &warp, F f) {
    if (warp.mask == ~0u)
        for (int lane = 0; lane < LANES; lane++) f(lane);
    else
        for (int lane = 0; lane < LANES; lane++)
            if (warp.mask >> lane & 1) f(lane);
}

u8 *global(Warp &warp, u64 address, u64 size, u64 alignment) {
    Block &block = *warp.block;
    if (block.counts) block.of_global.push_back({address, (u32)size});
    if (address % alignment) fail(access("global", address, size) + ", which is not aligned");
    if (block.num_ranges == 0) return (u8 *)address;
    for (int tried = 0; tried < block.num_ranges; tried++, block.last_range = (block.last_range + 1) % block.num_ranges) {
        const Range &range = block.ranges[block.last_range];
        if (address >= range.begin && address + size <= range.end) return (u8 *)address;
    }
    fail(access("global", address, size) + ", which the kernel was not given");
}

u8 *shared(Warp &warp, u64 address, u64 size, u64 alignment) {
    if (warp.block->counts) warp.block->of_shared.push_back({address, (u32)size});
    if (address % alignment) fail(access("shared", address, size) + ", which is not aligned");
    if (address + size > warp.block->shared.size()) fail(access("shared", address, size) + ", which the kernel does not have");
    return warp.block->shared.data() + address;
}

// What accesses of one instruction cost. Lanes whose accesses have 128 bytes together are served at a time: in as many
// waves as there are different words in one of the 32 banks.
void count_accesses(Block &block, Count &count) {
    std::vector<Access> &accesses = block.of_shared;
    for (size_t first = 0, next; first < accesses.size(); first = next) {
        std::vector<u64> words;
        u32 bytes = 0;
        for (next = first; next < accesses.size() && bytes + accesses[next].size <= 128; next++) {
            bytes += accesses[next].size;
            for (u64 word = accesses[next].address / 4; word * 4 < accesses[next].address + accesses[next].size; word++) words.push_back(word);
        }
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        int in_bank[32] = {};
        for (u64 word : words) in_bank[word % 32]++;
        count.waves += *std::max_element(in_bank, in_bank + 32);
        count.least_waves++;
    }
    std::vector<u64> sectors;
    u64 bytes = 0;
    std::sort(block.of_global.begin(), block.of_global.end(), [](const Access &a, const Access &b) { return a.address < b.address; });
    u64 end = 0;
    for (const Access &access : block.of_global) {
        const u64 last = access.address + access.size;
        bytes += last > end ? last - std::max(end, access.address) : 0;
        end = std::max(end, last);
        for (u64 sector = access.address / 32; sector * 32 < last; sector++)
            if (sectors.empty() || sectors.back() < sector) sectors.push_back(sector);
    }
    count.sectors += sectors.size();
    count.least_sectors += (bytes + 31) / 32;
    block.of_shared.clear(), block.of_global.clear();
}

std::unordered_map<std::string, Operation> &table() {
    static std::unordered_map<std::string, Operation> operations;
    return operations;
}

// Instructions that all lanes of a warp execute together.
std::unordered_set<Operation> &collectives() {
    static std::unordered_set<Operation> operations;
    return operations;
}

void add(const std::string &name, Operation operation) {
    table()[name] = operation;
    const std::string kind = name.substr(0, name.find('.'));
    for (const char *one : {"bar", "shfl", "redux", "vote", "ldmatrix", "stmatrix", "mma", "wgmma"})
        if (kind == one) collectives().insert(operation);
}

// Operations on each lane. F has no state.

template <class D, class A, class F>
void one(Warp &warp, const Instruction &i) {
    D *d = warp.lanes<D>(i.operands[0]);
    const A *a = warp.lanes<A>(i.operands[1]);
    each(warp, [&](int l) { d[l] = F()(a[l]); });
}

template <class D, class A, class B, class F>
void two(Warp &warp, const Instruction &i) {
    D *d = warp.lanes<D>(i.operands[0]);
    const A *a = warp.lanes<A>(i.operands[1]);
    const B *b = warp.lanes<B>(i.operands[2]);
    each(warp, [&](int l) { d[l] = F()(a[l], b[l]); });
}

template <class D, class A, class B, class C, class F>
void three(Warp &warp, const Instruction &i) {
    D *d = warp.lanes<D>(i.operands[0]);
    const A *a = warp.lanes<A>(i.operands[1]);
    const B *b = warp.lanes<B>(i.operands[2]);
    const C *c = warp.lanes<C>(i.operands[3]);
    each(warp, [&](int l) { d[l] = F()(a[l], b[l], c[l]); });
}

template <class D, class A = D, class F>
void add_one(const std::string &name, F) { add(name, one<D, A, F>); }
template <class D, class A = D, class B = A, class F>
void add_two(const std::string &name, F) { add(name, two<D, A, B, F>); }
template <class D, class A = D, class B = A, class C = D, class F>
void add_three(const std::string &name, F) { add(name, three<D, A, B, C, F>); }

template <class T>
T largest(T a, T b) { return a > b ? a : b; }
template <class T>
T smallest(T a, T b) { return a < b ? a : b; }

template <class T, class Wide>
void add_integers(const std::string &type) {
    typedef std::make_unsigned_t<T> U;
    add_two<T>("add." + type, [](T a, T b) { return (T)((U)a + (U)b); });
    add_two<T>("sub." + type, [](T a, T b) { return (T)((U)a - (U)b); });
    add_two<T>("mul.lo." + type, [](T a, T b) { return (T)((Wide)a * (Wide)b); });
    add_two<T>("mul.hi." + type, [](T a, T b) { return (T)(((Wide)a * (Wide)b) >> 8 * sizeof(T)); });
    add_three<T>("mad.lo." + type, [](T a, T b, T c) { return (T)((Wide)a * (Wide)b + (Wide)c); });
    add_two<T>("min." + type, [](T a, T b) { return smallest(a, b); });
    add_two<T>("max." + type, [](T a, T b) { return largest(a, b); });
    add_two<T>("max.relu." + type, [](T a, T b) { return largest(largest(a, b), T(0)); });
    add_two<T>("div." + type, [](T a, T b) { return b ? (T)((Wide)a / (Wide)b) : (T)-1; });
    add_two<T>("rem." + type, [](T a, T b) { return b ? (T)((Wide)a % (Wide)b) : a; });
    add_two<T, T, u32>("shr." + type, [](T a, u32 b) { return b < 8 * sizeof(T) ? (T)(a >> b) : a < 0 ? (T)-1 : (T)0; });
    add_three<T, T, u32, u32>("bfe." + type, [](T a, u32 start, u32 length) {
        start &= 255, length &= 255;
        constexpr u32 SIZE = 8 * sizeof(T);
        if (!length) return (T)0;
        T sign = std::is_signed_v<T> ? (T)((U)a >> std::min(start + length - 1, SIZE - 1) & 1) : (T)0;
        U field = start >= SIZE ? 0 : (U)a >> start;
        u32 kept = start >= SIZE ? 0 : std::min(length, SIZE - start);
        U mask = kept >= SIZE ? ~(U)0 : ((U)1 << kept) - 1;
        return (T)((field & mask) | (sign ? ~mask : 0));
    });
    if constexpr (std::is_signed_v<T>) {
        add_one<T>("neg." + type, [](T a) { return (T)-(U)a; });
        add_one<T>("abs." + type, [](T a) { return a < 0 ? (T)-(U)a : a; });
    }
    if constexpr (sizeof(T) < 8) {
        add_two<Wide, T>("mul.wide." + type, [](T a, T b) { return (Wide)a * (Wide)b; });
        add_three<Wide, T, T, Wide>("mad.wide." + type, [](T a, T b, Wide c) { return (Wide)((Wide)a * (Wide)b + c); });
    }
}

template <class U>
void add_bits(const std::string &type) {
    add_two<U>("and." + type, [](U a, U b) { return (U)(a & b); });
    add_two<U>("or." + type, [](U a, U b) { return (U)(a | b); });
    add_two<U>("xor." + type, [](U a, U b) { return (U)(a ^ b); });
    add_one<U>("not." + type, [](U a) { return (U)~a; });
    add_two<U, U, u32>("shl." + type, [](U a, u32 b) { return b < 8 * sizeof(U) ? (U)(a << b) : (U)0; });
    add_two<U, U, u32>("shr." + type, [](U a, u32 b) { return b < 8 * sizeof(U) ? (U)(a >> b) : (U)0; });
    add_one<U>("mov." + type, [](U a) { return a; });
    add_one<u32, U>("popc." + type, [](U a) { return (u32)__builtin_popcountll(a); });
    add_one<u32, U>("clz." + type, [](U a) { return a ? (u32)(__builtin_clzll(a) - 64 + 8 * sizeof(U)) : (u32)(8 * sizeof(U)); });
    add("lop3." + type, [](Warp &warp, const Instruction &i) {
        U *d = warp.lanes<U>(i.operands[0]);
        const U *a = warp.lanes<U>(i.operands[1]), *b = warp.lanes<U>(i.operands[2]), *c = warp.lanes<U>(i.operands[3]);
        u32 truth = (u32)i.operands[4];
        each(warp, [&](int l) {
            U result = 0;
            for (int k = 0; k < 8; k++)
                if (truth >> k & 1) result |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
            d[l] = result;
        });
    });
    add("selp." + type, [](Warp &warp, const Instruction &i) {
        U *d = warp.lanes<U>(i.operands[0]);
        const U *a = warp.lanes<U>(i.operands[1]), *b = warp.lanes<U>(i.operands[2]);
        u32 chosen = *warp.lanes<u32>(i.operands[3]);
        each(warp, [&](int l) { d[l] = chosen >> l & 1 ? a[l] : b[l]; });
    });
}

template <class T>
void add_floats(const std::string &type) {
    typedef std::conditional_t<std::is_same_v<T, f64>, f64, f32> Inner;
    // What is a product of 16-bit floats, and a sum with one, is exact in float64, but for sums of very different sizes.
    typedef std::conditional_t<is_small<T>, f64, Inner> Wide;
    add_two<T>("add." + type, [](T a, T b) { return T((Wide)a + (Wide)b); });
    add_two<T>("sub." + type, [](T a, T b) { return T((Wide)a - (Wide)b); });
    add_two<T>("mul." + type, [](T a, T b) { return T((Wide)a * (Wide)b); });
    add_two<T>("div." + type, [](T a, T b) { return T((Wide)a / (Wide)b); });
    add_three<T>("fma." + type, [](T a, T b, T c) { return T(std::fma((Wide)a, (Wide)b, (Wide)c)); });
    add_two<T>("min." + type, [](T a, T b) { return T(std::fmin((Wide)a, (Wide)b)); });
    add_two<T>("max." + type, [](T a, T b) { return T(std::fmax((Wide)a, (Wide)b)); });
    add_two<T>("min.NaN." + type, [](T a, T b) { return (Wide)a != (Wide)a ? a : (Wide)b != (Wide)b ? b : T(std::fmin((Wide)a, (Wide)b)); });
    add_two<T>("max.NaN." + type, [](T a, T b) { return (Wide)a != (Wide)a ? a : (Wide)b != (Wide)b ? b : T(std::fmax((Wide)a, (Wide)b)); });
    add_one<T>("neg." + type, [](T a) { return T(-(Wide)a); });
    add_one<T>("abs." + type, [](T a) { return T(std::fabs((Wide)a)); });
    add_one<T>("ex2." + type, [](T a) { return T(std::exp2((Wide)a)); });
    add_one<T>("lg2." + type, [](T a) { return T(std::log2((Wide)a)); });
    add_one<T>("rcp." + type, [](T a) { return T(1 / (Wide)a); });
    add_one<T>("sqrt." + type, [](T a) { return T(std::sqrt((Wide)a)); });
    add_one<T>("rsqrt." + type, [](T a) { return T(1 / std::sqrt((Wide)a)); });
    add_one<T>("sin." + type, [](T a) { return T(std::sin((Wide)a)); });
    add_one<T>("cos." + type, [](T a) { return T(std::cos((Wide)a)); });
    add_one<T>("tanh." + type, [](T a) { return T(std::tanh((Wide)a)); });
}

template <class T>
void add_pairs(const std::string &type) {
    typedef Pair<T> P;
    add_two<P>("add." + type, [](P a, P b) { return P{T((f64)a.low + b.low), T((f64)a.high + b.high)}; });
    add_two<P>("sub." + type, [](P a, P b) { return P{T((f64)a.low - b.low), T((f64)a.high - b.high)}; });
    add_two<P>("mul." + type, [](P a, P b) { return P{T((f64)a.low * b.low), T((f64)a.high * b.high)}; });
    add_three<P>("fma." + type, [](P a, P b, P c) { return P{T((f64)a.low * b.low + c.low), T((f64)a.high * b.high + c.high)}; });
    add_two<P, f32>("cvt." + type + ".f32", [](f32 a, f32 b) { return P{T(b), T(a)}; });
}

template <class T, class Relation>
void compare(Warp &warp, const Instruction &i) {
    const T *a = warp.lanes<T>(i.operands[1]), *b = warp.lanes<T>(i.operands[2]);
    u32 result = 0;
    for (int l = 0; l < LANES; l++) result |= (u32)Relation()(a[l], b[l]) << l;
    // How it is joined with another predicate: 0 not at all, 1 and, 2 or, 3 xor.
    u32 other = i.operands[3] ? *warp.lanes<u32>(i.operands[4]) : 0;
    result = i.operands[3] == 1 ? result & other : i.operands[3] == 2 ? result | other : i.operands[3] == 3 ? result ^ other : result;
    u32 *d = warp.lanes<u32>(i.operands[0]);
    *d = (*d & ~warp.mask) | (result & warp.mask);
}

template <class T>
void add_relations(const std::string &type) {
    auto relation = [&]<class F>(const char *name, F) { add("setp." + std::string(name) + "." + type, compare<T, F>); };
    relation("eq", [](T a, T b) { return a == b; });
    relation("lt", [](T a, T b) { return a < b; });
    relation("le", [](T a, T b) { return a <= b; });
    relation("gt", [](T a, T b) { return a > b; });
    relation("ge", [](T a, T b) { return a >= b; });
    if constexpr (std::is_integral_v<T>) {
        relation("ne", [](T a, T b) { return a != b; });
    } else {
        relation("ne", [](T a, T b) { return a < b || a > b; });
        relation("equ", [](T a, T b) { return !(a < b || a > b); });
        relation("neu", [](T a, T b) { return a != b; });
        relation("ltu", [](T a, T b) { return !(a >= b); });
        relation("leu", [](T a, T b) { return !(a > b); });
        relation("gtu", [](T a, T b) { return !(a <= b); });
        relation("geu", [](T a, T b) { return !(a < b); });
        relation("num", [](T a, T b) { return a == a && b == b; });
        relation("nan", [](T a, T b) { return a != a || b != b; });
    }
}

template <class F>
void logical(Warp &warp, const Instruction &i) {
    u32 result = F()(*warp.lanes<u32>(i.operands[1]), *warp.lanes<u32>(i.operands[2]));
    u32 *d = warp.lanes<u32>(i.operands[0]);
    *d = (*d & ~warp.mask) | (result & warp.mask);
}

// Conversions.

template <class D, class S>
D saturated(S value) {
    f64 wide = (f64)value;
    if (wide != wide) return 0;
    f64 least = (f64)std::numeric_limits<D>::min(), most = (f64)std::numeric_limits<D>::max();
    return wide <= least ? std::numeric_limits<D>::min() : wide >= most ? std::numeric_limits<D>::max() : (D)wide;
}

template <class D, class S>
void add_conversion(const std::string &to, const std::string &from) {
    const std::string end = to + "." + from;
    constexpr bool floating_to = std::is_floating_point_v<D> || is_small<D>, floating_from = std::is_floating_point_v<S> || is_small<S>;
    if constexpr (floating_from && !floating_to) {
        add_one<D, S>("cvt.rzi." + end, [](S a) { return saturated<D>(std::trunc((f64)a)); });
        add_one<D, S>("cvt.rni." + end, [](S a) { return saturated<D>(std::nearbyint((f64)a)); });
        add_one<D, S>("cvt.rmi." + end, [](S a) { return saturated<D>(std::floor((f64)a)); });
        add_one<D, S>("cvt.rpi." + end, [](S a) { return saturated<D>(std::ceil((f64)a)); });
    } else if constexpr (floating_from && floating_to) {
        add_one<D, S>("cvt." + end, [](S a) { return D((std::conditional_t<std::is_same_v<S, f64>, f64, f32>)a); });
        if constexpr (std::is_same_v<D, S>) {
            add_one<D, S>("cvt.rmi." + end, [](S a) { return D(std::floor((f64)a)); });
            add_one<D, S>("cvt.rpi." + end, [](S a) { return D(std::ceil((f64)a)); });
            add_one<D, S>("cvt.rni." + end, [](S a) { return D(std::nearbyint((f64)a)); });
            add_one<D, S>("cvt.rzi." + end, [](S a) { return D(std::trunc((f64)a)); });
        }
    } else if constexpr (floating_to) {
        add_one<D, S>("cvt." + end, [](S a) { return std::is_same_v<D, f32> ? D((f32)a) : D((f64)a); });
    } else {
        add_one<D, S>("cvt." + end, [](S a) { return (D)a; });
        add_one<D, S>("cvt.sat." + end, [](S a) { return saturated<D>(a); });
    }
}

template <class D>
void add_conversions(const std::string &to) {
    add_conversion<D, u16>(to, "u16"), add_conversion<D, s16>(to, "s16");
    add_conversion<D, u32>(to, "u32"), add_conversion<D, s32>(to, "s32");
    add_conversion<D, u64>(to, "u64"), add_conversion<D, s64>(to, "s64");
    add_conversion<D, f16>(to, "f16"), add_conversion<D, bf16>(to, "bf16");
    add_conversion<D, f32>(to, "f32"), add_conversion<D, f64>(to, "f64");
}

// The lowest bytes of registers.
template <class Register>
void add_lowest(const std::string &size) {
    add_one<s32, Register>("lowest.s8." + size, [](Register a) { return (s32)(s8)a; });
    add_one<u32, Register>("lowest.u8." + size, [](Register a) { return (u32)(u8)a; });
}

// Parts of registers: the operands are the place of the whole, its bytes, the number of parts, and their places.

void pack(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    int part = o[1] / o[2];
    each(warp, [&](int l) {
        for (int k = 0; k < o[2]; k++) memcpy(warp.registers.data() + o[0] + l * o[1] + k * part, warp.registers.data() + o[3 + k] + l * part, part);
    });
}

void unpack(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    int part = o[1] / o[2];
    each(warp, [&](int l) {
        for (int k = 0; k < o[2]; k++) memcpy(warp.registers.data() + o[3 + k] + l * part, warp.registers.data() + o[0] + l * o[1] + k * part, part);
    });
}

// Memory. Operands: the place of the address, what is added to it, how many, and the places of the values.

typedef u8 *(*Space)(Warp &, u64, u64, u64);

template <class Address, Space SPACE, class Memory, class Register>
void load(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    int count = o[2];
    const Address *address = warp.lanes<Address>(o[0]);
    Memory values[8][LANES];
    each(warp, [&](int l) {
        const u8 *from = SPACE(warp, address[l] + (s64)o[1], count * sizeof(Memory), count * sizeof(Memory));
        for (int k = 0; k < count; k++) memcpy(&values[k][l], from + k * sizeof(Memory), sizeof(Memory));
    });
    for (int k = 0; k < count; k++) {
        if (o[3 + k] < 0) continue;
        Register *d = warp.lanes<Register>(o[3 + k]);
        each(warp, [&](int l) { d[l] = (Register)values[k][l]; });
    }
}

template <class Address, Space SPACE, class Memory, class Register>
void store(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    int count = o[2];
    const Address *address = warp.lanes<Address>(o[0]);
    each(warp, [&](int l) {
        u8 *to = SPACE(warp, address[l] + (s64)o[1], count * sizeof(Memory), count * sizeof(Memory));
        for (int k = 0; k < count; k++) {
            Memory value = (Memory)warp.lanes<Register>(o[3 + k])[l];
            memcpy(to + k * sizeof(Memory), &value, sizeof value);
        }
    });
}

template <class Memory, class Register>
void add_memory(const std::string &type, const std::string &size) {
    add("ld.global." + type + "." + size, load<u64, global, Memory, Register>);
    add("st.global." + type + "." + size, store<u64, global, Memory, Register>);
    add("ld.shared." + type + "." + size, load<u32, shared, Memory, Register>);
    add("st.shared." + type + "." + size, store<u32, shared, Memory, Register>);
    add("ld.param." + type + "." + size, [](Warp &warp, const Instruction &i) {
        Memory value;
        memcpy(&value, warp.block->parameters + i.operands[1], sizeof value);
        Register *d = warp.lanes<Register>(i.operands[0]);
        each(warp, [&](int l) { d[l] = (Register)value; });
    });
}

// Copies that are waited for. Operands: target, what is added, source, what is added, size, the place of what is read of it or -1.

void copy_async(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    each(warp, [&](int l) {
        u32 target = warp.lanes<u32>(o[0])[l] + o[1];
        u64 source = warp.lanes<u64>(o[2])[l] + (s64)o[3];
        u32 size = o[4], taken = o[5] < 0 ? size : warp.lanes<u32>(o[5])[l];
        shared(warp, target, size, size);
        if (taken) global(warp, source, taken, size);
        warp.copies.push_back({target, source, size, taken, warp.group});
    });
}

void commit_group(Warp &warp, const Instruction &) { warp.group++; }

void wait_group(Warp &warp, const Instruction &i) {
    int done = warp.group - i.operands[0];
    std::vector<Copy> left;
    for (const Copy &copy : warp.copies) {
        if (copy.group >= done) {
            left.push_back(copy);
            continue;
        }
        u8 *target = warp.block->shared.data() + copy.target;
        memset(target, 0, copy.size);
        memcpy(target, (const u8 *)copy.source, copy.taken);
    }
    warp.copies.swap(left);
}

// Exchanges in a warp. Operands: result, its predicate or -1, value, distance, bounds.

template <int MODE>
void shuffle(Warp &warp, const Instruction &i) {
    const s32 *o = i.operands;
    const u32 *a = warp.lanes<u32>(o[2]), *b = warp.lanes<u32>(o[3]), *c = warp.lanes<u32>(o[4]);
    u32 before[LANES], *d = warp.lanes<u32>(o[0]), found = 0;
    memcpy(before, a, sizeof before);
    each(warp, [&](int l) {
        int distance = b[l] & 31, bound = c[l] & 31, segment = c[l] >> 8 & 31;
        int most = (l & segment) | (bound & ~segment), least = l & segment;
        int other = MODE == 0 ? l - distance : MODE == 1 ? l + distance : MODE == 2 ? l ^ distance : least | (distance & ~segment);
        bool there = MODE == 0 ? other >= most : other <= most;
        if (!there) other = l;
        if (!(warp.mask >> other & 1)) fail("a shuffle that reads a lane which does not take part");
        d[l] = before[other];
        found |= (u32)there << l;
    });
    if (o[1] >= 0) {
        u32 *p = warp.lanes<u32>(o[1]);
        *p = (*p & ~warp.mask) | (found & warp.mask);
    }
}

template <class T, class F>
void reduce(Warp &warp, const Instruction &i) {
    const T *a = warp.lanes<T>(i.operands[1]);
    bool first = true;
    T result = 0;
    each(warp, [&](int l) { result = first ? a[l] : F()(result, a[l]), first = false; });
    T *d = warp.lanes<T>(i.operands[0]);
    each(warp, [&](int l) { d[l] = result; });
}

template <class T>
void add_reductions(const std::string &type) {
    auto reduction = [&]<class F>(const char *name, F) { add("redux." + std::string(name) + "." + type, reduce<T, F>); };
    reduction("add", [](T a, T b) { return (T)(a + b); });
    reduction("min", [](T a, T b) { return smallest(a, b); });
    reduction("max", [](T a, T b) { return largest(a, b); });
    reduction("and", [](T a, T b) { return (T)(a & b); });
    reduction("or", [](T a, T b) { return (T)(a | b); });
    reduction("xor", [](T a, T b) { return (T)(a ^ b); });
}

template <int MODE>
void vote(Warp &warp, const Instruction &i) {
    u32 value = *warp.lanes<u32>(i.operands[1]) & warp.mask;
    if (MODE == 2) {
        u32 *d = warp.lanes<u32>(i.operands[0]);
        each(warp, [&](int l) { d[l] = value; });
        return;
    }
    u32 result = (MODE == 0 ? value == warp.mask : value != 0) ? ~0u : 0;
    u32 *d = warp.lanes<u32>(i.operands[0]);
    *d = (*d & ~warp.mask) | (result & warp.mask);
}

// Matrices of 8 x 8 in shared memory. Operands: the place of the addresses, what is added, how many, and the registers.

void whole_warp(Warp &warp) {
    if (warp.mask != ~0u) fail("an instruction of a whole warp in a part of it");
}

template <bool TRANSPOSED, bool STORES>
void matrices(Warp &warp, const Instruction &i) {
    whole_warp(warp);
    const s32 *o = i.operands;
    const u32 *address = warp.lanes<u32>(o[0]);
    for (int matrix = 0; matrix < o[2]; matrix++) {
        u16 *registers = warp.lanes<u16>(o[3 + matrix]);
        u8 *rows[8];
        for (int row = 0; row < 8; row++) rows[row] = shared(warp, address[8 * matrix + row] + o[1], 16, 16);
        for (int l = 0; l < LANES; l++)
            for (int k = 0; k < 2; k++) {
                int row = TRANSPOSED ? l % 4 * 2 + k : l / 4, column = TRANSPOSED ? l / 4 : l % 4 * 2 + k;
                u8 *place = rows[row] + 2 * column;
                if (STORES) memcpy(place, &registers[2 * l + k], 2);
                else memcpy(&registers[2 * l + k], place, 2);
            }
    }
}

// Tensor cores. Tiles of a warp: 16 rows of A, and B by columns.

template <class T>
struct Element {
    typedef T Raw;
    static f32 number(T value) { return (f32)value; }
};
struct Tf32 {
    typedef u32 Raw;
    // Of a float32's mantissa, 10 bits count.
    static f32 number(u32 value) { return bits<f32>(value & 0xffffe000u); }
};
template <class T>
struct Integer {
    typedef T Raw;
    static s32 number(T value) { return value; }
};

// A of 16 rows in registers: 4 x 4 bytes a lane, or 2 x 4 where K is half as large.
template <class E, int K, class Number>
void fragment_a(Warp &warp, const s32 *places, Number a[16][K]) {
    typedef typename E::Raw Raw;
    constexpr int PER = 4 / sizeof(Raw);
    constexpr int REGISTERS = 16 * K / LANES / PER;
    for (int r = 0; r < REGISTERS; r++)
        for (int l = 0; l < LANES; l++)
            for (int e = 0; e < PER; e++)
                a[l / 4 + r % 2 * 8][l % 4 * PER + e + r / 2 * 4 * PER] = E::number(warp.lanes<Raw>(places[r])[l * PER + e]);
}

template <class E, int K, class Sum>
void multiply(Warp &warp, const Instruction &i) {
    whole_warp(warp);
    typedef decltype(E::number(typename E::Raw())) Number;
    typedef typename E::Raw Raw;
    constexpr int PER = 4 / sizeof(Raw), A = 16 * K / LANES / PER, B = 8 * K / LANES / PER;
    const s32 *o = i.operands;  // 4 of D, A, B, 4 of C
    Number a[16][K], b[8][K];
    fragment_a<E, K>(warp, o + 4, a);
    for (int r = 0; r < B; r++)
        for (int l = 0; l < LANES; l++)
            for (int e = 0; e < PER; e++) b[l / 4][l % 4 * PER + e + r * 4 * PER] = E::number(warp.lanes<Raw>(o[4 + A + r])[l * PER + e]);
    const s32 *c = o + 4 + A + B;
    Sum results[4][LANES];
    for (int r = 0; r < 4; r++)
        for (int l = 0; l < LANES; l++) {
            int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
            Sum sum = warp.lanes<Sum>(c[r])[l];
            for (int k = 0; k < K; k++) sum += (Sum)a[row][k] * (Sum)b[column][k];
            results[r][l] = sum;
        }
    for (int r = 0; r < 4; r++) memcpy(warp.lanes<Sum>(o[r]), results[r], sizeof results[r]);
}

// A matrix in shared memory that a descriptor tells of: rows are M or N. One row's bytes lie together (K), or one of K's.
struct Descriptor {
    u32 start, leading, stride, swizzle;

    Descriptor(u64 value)
        : start((value & 0x3fff) << 4), leading((value >> 16 & 0x3fff) << 4), stride((value >> 32 & 0x3fff) << 4),
          swizzle(value >> 62) {
        if (value >> 49 & 7) fail("a matrix in shared memory with an offset of its base");
    }

    u32 address(u32 row, u32 k, u32 size, bool transposed) const {
        static constexpr u32 widths[] = {16, 128, 64, 32}, masks[] = {0, 7, 3, 1};
        u32 width = widths[swizzle], place;
        if (!transposed) {
            u32 byte = k * size;
            place = row / 8 * stride + row % 8 * width + byte % width + byte / width * leading;
            if (swizzle && byte / width) fail("a row of a matrix in shared memory that is wider than its swizzle");
        } else {
            u32 byte = row * size;
            if (!swizzle) place = byte / 16 * stride + byte % 16 + k / 8 * leading + k % 8 * 16;
            else place = byte / width * leading + byte % width + k / 8 * stride + k % 8 * width;
        }
        u32 whole = start + place;
        return whole ^ (whole >> 7 & masks[swizzle]) << 4;
    }
};

// Of a group of four warps, each multiplies 16 rows. Operands: N, its registers of D, whether A is in registers, A, B, the place of
// the predicate that keeps D, signs of A and B, whether A and B are transposed.
template <class E, int K, class Sum>
void multiply_group(Warp &warp, const Instruction &i) {
    whole_warp(warp);
    typedef decltype(E::number(typename E::Raw())) Number;
    typedef typename E::Raw Raw;
    // How tensor cores read shared memory is theirs.
    const bool counts = std::exchange(warp.block->counts, false);
    const s32 *o = i.operands;
    int n = *o++;
    const s32 *d = o;
    o += n / 2;
    Number a[16][K];
    int first = *warp.lanes<u32>(o[0]) / LANES % 4 * 16;
    o++;
    bool in_registers = *o++;
    const s32 *further = o + (in_registers ? 4 : 1);
    bool keeps = *warp.lanes<u32>(further[1]) & 1;
    int sign_a = further[2], sign_b = further[3], transposed_a = further[4], transposed_b = further[5];
    auto element = [&](u32 address) {
        Raw raw;
        memcpy(&raw, shared(warp, address, sizeof raw, sizeof raw), sizeof raw);
        return E::number(raw);
    };
    if (in_registers) fragment_a<E, K>(warp, o, a);
    else {
        Descriptor of_a(*warp.lanes<u64>(o[0]));
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < K; k++) a[row][k] = element(of_a.address(first + row, k, sizeof(Raw), transposed_a));
    }
    Descriptor of_b(*warp.lanes<u64>(further[0]));
    for (int column = 0; column < n; column += 8) {
        Number b[8][K];
        for (int c = 0; c < 8; c++)
            for (int k = 0; k < K; k++) b[c][k] = element(of_b.address(column + c, k, sizeof(Raw), transposed_b));
        for (int r = 0; r < 4; r++) {
            Sum *sums = warp.lanes<Sum>(d[column / 2 + r]);
            for (int l = 0; l < LANES; l++) {
                Sum sum = 0;
                for (int k = 0; k < K; k++) sum += (Sum)a[l / 4 + r / 2 * 8][k] * (Sum)b[l % 4 * 2 + r % 2][k];
                sums[l] = (keeps ? sums[l] : 0) + sum * (Sum)(sign_a * sign_b);
            }
        }
    }
    warp.block->counts = counts;
}

void nothing(Warp &, const Instruction &) {}

// Jumps change where lanes go on. Operands: the number of the instruction.

void branch(Warp &warp, const Instruction &i) {
    u32 target = i.operands[0];
    if (!warp.diverged && warp.mask == warp.alive) {
        warp.next = target;
        return;
    }
    if (!warp.diverged)
        for (int l = 0; l < LANES; l++) warp.at[l] = warp.next;
    warp.diverged = true;
    each(warp, [&](int l) { warp.at[l] = target; });
}

void leave(Warp &warp, const Instruction &) { warp.alive &= ~warp.mask; }

void barrier(Warp &warp, const Instruction &) {
    if (warp.mask != warp.alive) fail("a barrier that only a part of a warp reaches");
    warp.waits = true;
}

void trap(Warp &, const Instruction &) { fail("the kernel traps"); }

void byte_permute(Warp &warp, const Instruction &i) {
    u32 *d = warp.lanes<u32>(i.operands[0]);
    const u32 *a = warp.lanes<u32>(i.operands[1]), *b = warp.lanes<u32>(i.operands[2]), *c = warp.lanes<u32>(i.operands[3]);
    each(warp, [&](int l) {
        u64 both = (u64)b[l] << 32 | a[l];
        u32 result = 0;
        for (int k = 0; k < 4; k++) {
            u32 chosen = c[l] >> 4 * k & 15, byte = both >> 8 * (chosen & 7) & 255;
            if (chosen & 8) byte = byte & 128 ? 255 : 0;
            result |= byte << 8 * k;
        }
        d[l] = result;
    });
}

bool fill_table() {
    add_integers<u16, u32>("u16"), add_integers<s16, s32>("s16");
    add_integers<u32, u64>("u32"), add_integers<s32, s64>("s32");
    add_integers<u64, unsigned __int128>("u64"), add_integers<s64, __int128>("s64");
    add_bits<u16>("b16"), add_bits<u32>("b32"), add_bits<u64>("b64");
    add_floats<f32>("f32"), add_floats<f64>("f64"), add_floats<f16>("f16"), add_floats<bf16>("bf16");
    add_pairs<f16>("f16x2"), add_pairs<bf16>("bf16x2");
    add_relations<u16>("u16"), add_relations<s16>("s16"), add_relations<u16>("b16");
    add_relations<u32>("u32"), add_relations<s32>("s32"), add_relations<u32>("b32");
    add_relations<u64>("u64"), add_relations<s64>("s64"), add_relations<u64>("b64");
    add_relations<f32>("f32"), add_relations<f64>("f64"), add_relations<f16>("f16"), add_relations<bf16>("bf16");
    add_conversions<u16>("u16"), add_conversions<s16>("s16"), add_conversions<u32>("u32"), add_conversions<s32>("s32");
    add_conversions<u64>("u64"), add_conversions<s64>("s64"), add_conversions<f16>("f16"), add_conversions<bf16>("bf16");
    add_conversions<f32>("f32"), add_conversions<f64>("f64");
    add_lowest<u8>("8"), add_lowest<u16>("16"), add_lowest<u32>("32"), add_lowest<u64>("64");
    add_one<u16, u32>("lowest.u16.32", [](u32 a) { return (u16)a; });
    add_one<u16, u64>("lowest.u16.64", [](u64 a) { return (u16)a; });
    add_one<u32, u64>("lowest.u32.64", [](u64 a) { return (u32)a; });
    auto predicates = [&]<class F>(const char *name, F) { add(name, logical<F>); };
    predicates("and.pred", [](u32 a, u32 b) { return a & b; });
    predicates("or.pred", [](u32 a, u32 b) { return a | b; });
    predicates("xor.pred", [](u32 a, u32 b) { return a ^ b; });
    predicates("not.pred", [](u32 a, u32) { return ~a; });
    predicates("mov.pred", [](u32 a, u32) { return a; });
    add_memory<u8, u16>("b8", "16"), add_memory<u8, u32>("b8", "32"), add_memory<s8, s16>("s8", "16"), add_memory<s8, s32>("s8", "32");
    add_memory<u16, u16>("b16", "16"), add_memory<u16, u32>("b16", "32"), add_memory<s16, s32>("s16", "32");
    add_memory<u32, u32>("b32", "32"), add_memory<u32, u64>("b32", "64"), add_memory<s32, s64>("s32", "64");
    add_memory<u64, u64>("b64", "64");
    // Half of the last bit that counts rounds away from zero.
    add_one<u32, f32>("cvt.rna.tf32.f32", [](f32 a) { return (bits<u32>(a) + 0x1000u) & 0xffffe000u; });
    add("pack", pack), add("unpack", unpack), add("prmt.b32", byte_permute);
    add("cp.async", copy_async), add("cp.async.commit_group", commit_group), add("cp.async.wait_group", wait_group);
    add("shfl.up", shuffle<0>), add("shfl.down", shuffle<1>), add("shfl.bfly", shuffle<2>), add("shfl.idx", shuffle<3>);
    add_reductions<s32>("s32"), add_reductions<u32>("u32"), add_reductions<u32>("b32");
    add("vote.all", vote<0>), add("vote.any", vote<1>), add("vote.ballot", vote<2>);
    add("ldmatrix", matrices<false, false>), add("ldmatrix.trans", matrices<true, false>);
    add("stmatrix", matrices<false, true>), add("stmatrix.trans", matrices<true, true>);
    add("mma.m16n8k16.f32.bf16", multiply<Element<bf16>, 16, f32>), add("mma.m16n8k8.f32.bf16", multiply<Element<bf16>, 8, f32>);
    add("mma.m16n8k16.f32.f16", multiply<Element<f16>, 16, f32>), add("mma.m16n8k8.f32.f16", multiply<Element<f16>, 8, f32>);
    add("mma.m16n8k8.f32.tf32", multiply<Tf32, 8, f32>), add("mma.m16n8k4.f32.tf32", multiply<Tf32, 4, f32>);
    add("mma.m16n8k32.s32.s8", multiply<Integer<s8>, 32, s32>), add("mma.m16n8k16.s32.s8", multiply<Integer<s8>, 16, s32>);
    add("wgmma.k16.f32.bf16", multiply_group<Element<bf16>, 16, f32>), add("wgmma.k16.f32.f16", multiply_group<Element<f16>, 16, f32>);
    add("wgmma.k8.f32.tf32", multiply_group<Tf32, 8, f32>), add("wgmma.k32.s32.s8", multiply_group<Integer<s8>, 32, s32>);
    add("nop", nothing), add("bra", branch), add("ret", leave), add("exit", leave), add("bar", barrier), add("trap", trap);
    return true;
}

const bool filled = fill_table();

std::string failure;

void run_until_waiting(Warp &warp, const Instruction *code, const s32 *lines, Count *counts, s64 &left) {
    while (warp.alive && !warp.waits) {
        u32 at, mask;
        if (warp.diverged) {
            bool all_held = !(warp.alive & ~warp.held);
            u32 candidates = all_held ? warp.alive : warp.alive & ~warp.held;
            at = ~0u;
            for (int l = 0; l < LANES; l++)
                if (candidates >> l & 1) at = std::min(at, warp.at[l]);
            mask = 0;
            for (int l = 0; l < LANES; l++)
                if ((warp.alive >> l & 1) && warp.at[l] == at) mask |= 1u << l;
            // A block of other lanes may lie after the instruction and jump back to it.
            if (mask != warp.alive && !all_held && collectives().count(code[at].run)) {
                warp.held |= mask;
                continue;
            }
            warp.held &= ~mask;
            if (mask == warp.alive) warp.diverged = false;
        } else {
            at = warp.next;
            mask = warp.alive;
        }
        const Instruction &i = code[at];
        warp.next = at + 1;
        if (warp.diverged)
            for (int l = 0; l < LANES; l++)
                if (mask >> l & 1) warp.at[l] = at + 1;
        if (i.guard >= 0) mask &= *warp.lanes<u32>(i.guard) ^ (i.inverted ? ~0u : 0);
        if (!mask) continue;
        warp.mask = mask;
        if (--left < 0) fail("more instructions than it may take: does it end?");
        try {
            i.run(warp, i);
        } catch (const std::runtime_error &error) {
            fail("line " + std::to_string(lines[at]) + ": " + error.what());
        }
        if (counts) {
            counts[at].executed++;
            count_accesses(*warp.block, counts[at]);
        }
    }
}

}  // namespace

extern "C" {

Operation ptx_operation(const char *name) {
    auto found = table().find(name);
    return found == table().end() ? nullptr : found->second;
}

// special: places of %tid.x, y, z, %ntid.x, y, z, %ctaid.x, y, z, %nctaid.x, y, z, %laneid, or -1. counts: of each
// instruction, added to, or NULL. Returns why it failed, or NULL.
const char *ptx_run(const Instruction *code, const s32 *lines, const u8 *registers, s64 register_bytes, const s32 *special,
                    const u8 *parameters, const u32 *threads, const u32 *grid, s64 shared_bytes, const Range *ranges, int num_ranges,
                    int backwards, s64 most, Count *counts) {
    const u32 num_threads = threads[0] * threads[1] * threads[2], num_warps = (num_threads + LANES - 1) / LANES;
    try {
        const u64 programs = (u64)grid[0] * grid[1] * grid[2];
        Block block;
        block.parameters = parameters, block.ranges = ranges, block.num_ranges = num_ranges, block.last_range = 0, block.counts = counts != nullptr;
        std::vector<Warp> warps(num_warps);
        for (u64 number = 0; number < programs; number++) {
            const u64 program = backwards ? programs - 1 - number : number;
            const u32 id[] = {(u32)(program % grid[0]), (u32)(program / grid[0] % grid[1]), (u32)(program / grid[0] / grid[1])};
            block.shared.assign(shared_bytes, 0xff);
            for (u32 w = 0; w < num_warps; w++) {
                Warp &warp = warps[w];
                warp.block = &block;
                warp.registers.assign(registers, registers + register_bytes);
                warp.copies.clear();
                warp.group = 0, warp.held = 0, warp.diverged = warp.waits = false, warp.next = 0, warp.alive = 0;
                for (u32 l = 0; l < LANES; l++) {
                    const u32 thread = w * LANES + l;
                    if (thread < num_threads) warp.alive |= 1u << l;
                    const u32 values[] = {
                        thread % threads[0], thread / threads[0] % threads[1], thread / threads[0] / threads[1],
                        threads[0], threads[1], threads[2], id[0], id[1], id[2], grid[0], grid[1], grid[2], l,
                    };
                    for (u32 k = 0; k < sizeof values / sizeof *values; k++)
                        if (special[k] >= 0) warp.lanes<u32>(special[k])[l] = values[k];
                }
            }
            s64 left = most;
            for (bool alive = true; alive;) {
                alive = false;
                for (u32 w = 0; w < num_warps; w++) {
                    Warp &warp = warps[backwards ? num_warps - 1 - w : w];
                    warp.waits = false;
                    run_until_waiting(warp, code, lines, counts, left);
                    alive |= warp.alive != 0;
                }
            }
        }
    } catch (const std::runtime_error &error) {
        failure = error.what();
        return failure.c_str();
    }
    return nullptr;
}

}
