// Products with packed weights, gathered rows and norms.
#pragma once

#include <algorithm>
#include <utility>

#include "numbers.h"

// What a weight is stored as.
struct WeightKind {
    const char* name;
    int bits, input_bits;  // 0: as the inputs
    bool groups, minimums;
};
constexpr WeightKind PLAIN = {"plain", 0, 0, false, false}, INT8 = {"int8", 8, 16, false, false},
                     BYTES = {"int8 with inputs of 8 bits", 8, 8, false, false}, INT4 = {"int4", 4, 8, true, true},
                     INT4_WIDE = {"int4 with wide inputs", 4, 16, true, true},
                     SYMMETRIC = {"int4 without minimums", 4, 8, true, false},
                     SYMMETRIC_WIDE = {"int4 without minimums, with wide inputs", 4, 16, true, false}, GROUPS = {"int8", 8, 16, true, false},
                     GROUPS_WITH_MINIMUMS = {"int8 with minimums", 8, 16, true, true},
                     BYTE_GROUPS = {"int8 in groups with inputs of 8 bits", 8, 8, true, false},
                     BYTE_GROUPS_WITH_MINIMUMS = {"int8 with minimums and inputs of 8 bits", 8, 8, true, true},
                     CODES = {"codes of 4 bits", CODED_GROUPS, 16, true, false};
// What codes stand for (`kvalues_iq4nl` in llama.cpp's ggml-common.h).
constexpr int VALUES_OF_CODES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr long INPUT_GROUP = 128;  // inputs of 8 bits that share a scale beside weights that are not in groups

// A packed weight [out, in] and what it stands for.
struct Weight {
    WeightKind kind;
    long out, in, group;
    int dtype;
    bool gated;
    std::vector<double> values;
    std::unique_ptr<Memory> packed;

    Weight(WeightKind kind, int dtype, long out, long in, long group, bool gated, Random& random)
        : kind(kind), out(out), in(in), group(kind.groups ? group : 0), dtype(dtype), gated(gated) {
        values.resize(static_cast<std::size_t>(out * in));
        kind.bits ? quantize(random) : store(random);
    }

    double at(long row, long column) const { return values[static_cast<std::size_t>(row * in + column)]; }

private:
    long tiles() const { return ((gated ? out / 2 : out) + (gated ? 15 : 31)) / (gated ? 16 : 32); }

    void store(Random& random) {
        Numbers numbers(dtype, out * in, random);
        for (long i = 0; i < out * in; ++i) values[static_cast<std::size_t>(i)] = numbers[i];
        packed = std::make_unique<Memory>(tiles() * 32 * in * (dtype == FLOAT32 ? 4 : 2));
        kernels->pack(numbers.data(), packed->data(), out, in, dtype, gated, 2);
    }

    // Scales and zeros that float16 has, tiny ones among them.
    void quantize(Random& random) {
        long unit = group ? group : in, groups = (in + unit - 1) / unit;
        const bool coded = kind.bits == CODED_GROUPS;
        const int bits = coded ? 4 : kind.bits;
        std::vector<std::uint8_t> integers(static_cast<std::size_t>(out * in));
        for (auto& value : integers) value = static_cast<std::uint8_t>(random.below(1L << bits));
        std::vector<float> scales(static_cast<std::size_t>(out * groups)), zeros(scales.size());
        for (std::size_t i = 0; i < scales.size(); ++i) {
            bool tiny = random.below(20) == 0;
            scales[i] = static_cast<float>(1 + random.below(1023)) * (tiny ? 0x1p-24f : 0x1p-12f);
            zeros[i] = static_cast<float>(random.below(2047) - 1023) * (tiny ? 0x1p-24f : 0x1p-9f);
        }
        for (long row = 0; row < out; ++row)
            for (long column = 0; column < in; ++column) {
                auto place = static_cast<std::size_t>(row * in + column);
                auto number = static_cast<std::size_t>(row * groups + column / unit);
                double scale = static_cast<double>(scales[number]);
                double zero = kind.minimums ? static_cast<double>(zeros[number]) : 0;
                int value = coded ? VALUES_OF_CODES[integers[place]] : integers[place] - (bits == 8 ? 128 : kind.minimums ? 0 : 8);
                values[place] = scale * value + zero;
            }
        long padded = (in + 3) / 4 * 4;
        long bytes = group ? groups * 32 * (kind.minimums ? 4 : 2) + groups * 4 * group * bits : 32 * (4 + padded);
        packed = std::make_unique<Memory>(tiles() * bytes);
        auto* to = static_cast<std::uint8_t*>(packed->data());
        const float* minimums = kind.minimums ? zeros.data() : nullptr;
        kernels->pack_quantized(integers.data(), scales.data(), minimums, to, out, in, kind.bits, group, gated, 2);
    }
};

inline double activated(int kind, double x) {
    switch (kind) {
        case 1: return x / (1 + std::exp(-x));
        case 2: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
        case 3: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case 4: return x / (1 + std::exp(-1.702 * x));
        case 5: return std::max(x, 0.0);
        default: return x;
    }
}

// A product and how far it may be off: rounded inputs, and sums in float32.
struct Dot {
    double value = 0, error = 0;
};

inline Dot dot(const Weight& weight, const Numbers& x, long x_place, long row) {
    Dot result;
    double magnitude = 0, most = 0;
    for (long i = 0; i < weight.in; ++i) most = std::max(most, std::fabs(x[x_place + i]));
    long group = weight.kind.input_bits != 8 ? weight.in : weight.group ? weight.group : INPUT_GROUP;
    for (long start = 0; start < weight.in; start += group) {
        double sum_of_weights = 0, most_of_group = 0;
        for (long i = start; i < std::min(weight.in, start + group); ++i) {
            double w = weight.at(row, i), input = x[x_place + i];
            result.value += w * input;
            // Weights and their minimums are multiplied apart.
            magnitude += (std::fabs(w) + (weight.kind.bits ? 4 : 0)) * std::fabs(input);
            sum_of_weights += std::fabs(w);
            most_of_group = std::max(most_of_group, std::fabs(input));
        }
        if (weight.kind.input_bits == 8) result.error += sum_of_weights * most_of_group / 254;
        // Without an instruction for it, inputs beside weights of 8 bits keep 16.
        if (weight.kind.bits) result.error += sum_of_weights * most / (2 * 32639);
    }
    result.error = result.error * 1.01 + (magnitude + 1) * 0x1p-20;
    return result;
}

// What a call computes beside the product.
struct Epilogue {
    const char* name;
    int activation;
    bool gated, bias, residual, float_output;
};
constexpr Epilogue EPILOGUES[] = {
    {"nothing else", 0, false, false, false, false}, {"bias", 0, false, true, false, true},
    {"bias, SiLU", 1, false, true, false, false},    {"GELU, residual", 2, false, false, true, false},
    {"GELU by tanh", 3, false, false, false, true},  {"bias, quick GELU", 4, false, true, false, false},
    {"ReLU, residual", 5, false, false, true, false}, {"SiLU gates, residual", 1, true, false, true, false},
    {"GELU gates", 3, true, false, false, true},
};

// One weight with one epilogue, for every number of rows.
class Product {
public:
    Product(const Weight& weight, const Epilogue& then, long most_rows, Random& random)
        : weight_(weight),
          then_(then),
          output_dtype_(then.float_output ? static_cast<int>(FLOAT32) : weight.dtype),
          width_(then.gated ? weight.out / 2 : weight.out),
          x_(weight.dtype, most_rows * (weight.in + GAP), random),
          bias_(weight.dtype, weight.out, random),
          residual_(weight.dtype, most_rows * (width_ + GAP), random) {
        for (long row = 0; row < most_rows; ++row)
            for (long column = 0; column < width_; ++column) expected_.push_back(expect(row, column));
    }

    void run(long rows, int threads, Case& results) {
        Numbers y(output_dtype_, rows * (width_ + GAP));
        LinearArgs args = {};
        args.x = x_.data();
        args.weight = weight_.packed->data();
        args.bias = then_.bias ? bias_.data() : nullptr;
        args.residual = then_.residual ? residual_.data() : nullptr;
        args.y = y.data();
        args.rows = rows;
        args.in = weight_.in;
        args.out = weight_.out;
        args.x_stride = weight_.in + GAP;
        args.y_stride = width_ + GAP;
        args.dtype = weight_.dtype;
        args.activation = then_.activation;
        args.gated = then_.gated;
        args.float_output = then_.float_output;
        args.threads = threads;
        args.weight_bits = weight_.kind.bits;
        args.group = static_cast<int>(weight_.group);
        args.minimums = weight_.kind.minimums;
        args.input_bits = weight_.kind.input_bits;
        Memory scratch(kernels->linear_scratch(args), 0xff);
        args.scratch = scratch.data();
        kernels->linear(args);
        compare(y, rows, results);
        results.require(scratch.intact() && y.intact() && weight_.packed->intact(), "memory behind an array was written");
    }

private:
    static constexpr long GAP = 3;

    Dot expect(long row, long column) const {
        Dot product = dot(weight_, x_, row * (weight_.in + GAP), column);
        if (then_.gated) {
            Dot up = dot(weight_, x_, row * (weight_.in + GAP), column + width_);
            double gate = activated(then_.activation, product.value);
            product.error *= 1.2;
            product.error = product.error * (std::fabs(up.value) + up.error) + up.error * std::fabs(gate);
            product.value = gate * up.value;
        } else {
            product.value = activated(then_.activation, product.value + (then_.bias ? bias_[column] : 0));
            product.error *= 1.2;
        }
        product.error += 3e-6 * (1 + std::fabs(product.value));
        if (then_.residual) product.value += residual_[row * (width_ + GAP) + column];
        if (output_dtype_ == BFLOAT16) product.error += std::fabs(product.value) * 0x1p-8;
        return product;
    }

    // The first call is one with one row: a row's results do not depend on what else is in the batch.
    void compare(const Numbers& y, long rows, Case& results) {
        for (long row = 0; row < rows; ++row) {
            for (long column = 0; column < width_; ++column) {
                const Dot& expected = expected_[static_cast<std::size_t>(row * width_ + column)];
                double actual = y[row * (width_ + GAP) + column];
                results.compare(actual, expected.value, expected.error);
                if (row == 0 && rows == 1) alone_.push_back(actual);
                if (row == 0)
                    results.require(actual == alone_[static_cast<std::size_t>(column)], "a row depends on the others");
            }
            for (long column = width_; column < width_ + GAP; ++column)
                results.require(std::isnan(y[row * (width_ + GAP) + column]), "what is between rows was written");
        }
    }

    const Weight& weight_;
    const Epilogue& then_;
    int output_dtype_;
    long width_;
    Numbers x_, bias_, residual_;
    std::vector<Dot> expected_;
    std::vector<double> alone_;
};

inline void test_product(WeightKind kind, int dtype, long out, long in, long group, const Epilogue& then) {
    Random random(static_cast<std::uint64_t>(out * 1000 + in));
    Weight weight(kind, dtype, out, in, group, then.gated, random);
    std::string name = std::string("product: ") + kind.name + " [" + std::to_string(out) + ", " + std::to_string(in) + "]";
    if (kind.groups) name += " in groups of " + std::to_string(group);
    Case results(name + ", " + name_of(dtype) + ", " + then.name);
    Product product(weight, then, 40, random);
    for (long rows = 1; rows <= 13; ++rows) product.run(rows, static_cast<int>(1 + rows % 2), results);
    product.run(40, 2, results);
}

inline void test_products() {
    for (int dtype : {FLOAT32, BFLOAT16}) {
        for (const Epilogue& then : EPILOGUES) test_product(PLAIN, dtype, 46, 38, 0, then);
        // More inputs than are multiplied at a time.
        test_product(PLAIN, dtype, 35, 1102, 0, EPILOGUES[0]);
        for (const WeightKind& kind : {INT8, BYTES, INT4, INT4_WIDE, SYMMETRIC, SYMMETRIC_WIDE, GROUPS, GROUPS_WITH_MINIMUMS, BYTE_GROUPS, BYTE_GROUPS_WITH_MINIMUMS, CODES}) {
            test_product(kind, dtype, 33, 70, kind.groups && kind.bits == 8 ? 16 : 32, EPILOGUES[0]);
            test_product(kind, dtype, 70, 64, 64, EPILOGUES[7]);
            test_product(kind, dtype, 40, 330, 128, EPILOGUES[3]);
            test_product(kind, dtype, 7, 2, 32, EPILOGUES[2]);
        }
    }
    test_product(PLAIN, FLOAT32, 1, 1, 0, EPILOGUES[1]);
    test_product(PLAIN, FLOAT32, 67, 37, 0, EPILOGUES[0]);
    test_product(INT8, FLOAT32, 67, 37, 0, EPILOGUES[0]);
}

inline void test_gathered_rows(WeightKind kind, int dtype) {
    Random random(5);
    const long out = 75, in = 38, count = 70;
    Weight weight(kind, dtype, out, in, kind.bits == 8 ? 16 : 32, false, random);
    Case results(std::string("rows of a ") + kind.name + " weight, " + name_of(dtype));
    std::vector<std::int64_t> ids;
    for (long i = 0; i < count; ++i) ids.push_back(random.below(out));
    Numbers y(dtype, count * in);
    kernels->gather(weight.packed->data(), ids.data(), y.data(), count, in, dtype, kind.bits, weight.group,
                    kind.minimums, 2);
    for (long i = 0; i < count; ++i)
        for (long column = 0; column < in; ++column) {
            double expected = rounded(dtype, weight.at(ids[static_cast<std::size_t>(i)], column));
            double relative = dtype == FLOAT32 ? 0x1p-22 : 0x1p-7;
            results.compare(y[i * in + column], expected, 1e-6 + std::fabs(expected) * relative);
        }
    results.require(y.intact(), "memory behind the rows was written");
}

inline void test_norm(int dtype, long rows, long size, bool bias) {
    Random random(static_cast<std::uint64_t>(size));
    Numbers x(dtype, rows * size, random, 3), weight(FLOAT32, size, random), shift(FLOAT32, size, random);
    Numbers residual(dtype, rows * size, random), y(dtype, rows * size);
    const double eps = 1e-5;
    Case results(std::string(bias ? "LayerNorm" : "RMSNorm") + " over " + std::to_string(size) + ", " + name_of(dtype));
    NormArgs args = {x.data(), static_cast<const float*>(weight.data()), bias ? static_cast<const float*>(shift.data()) : nullptr,
                     bias ? residual.data() : nullptr, y.data(), rows, 1, size, size, 0, static_cast<float>(eps), bias, dtype, 2};
    kernels->norm(args);
    for (long row = 0; row < rows; ++row) {
        double mean = 0, variance = 0;
        for (long i = 0; i < size && bias; ++i) mean += x[row * size + i] / static_cast<double>(size);
        for (long i = 0; i < size; ++i) variance += std::pow(x[row * size + i] - mean, 2) / static_cast<double>(size);
        for (long i = 0; i < size; ++i) {
            double expected = (x[row * size + i] - mean) / std::sqrt(variance + eps) * weight[i];
            if (bias) expected += shift[i] + residual[row * size + i];
            // A row of one: what is left of it is rounding.
            double allowed = size == 1 ? 1e-3 : 2e-5 * (1 + std::fabs(expected));
            results.compare(y[row * size + i], expected, allowed + (dtype == FLOAT32 ? 0 : std::fabs(expected) * 0x1p-8));
        }
    }
    results.require(y.intact(), "memory behind the output was written");
}

inline void test_norms() {
    for (int dtype : {FLOAT32, BFLOAT16})
        for (bool bias : {false, true})
            for (long size : {1, 7, 16, 45, 130}) test_norm(dtype, size == 45 ? 20 : 3, size, bias);
}

inline void test_gates() {
    for (int dtype : {FLOAT32, BFLOAT16})
        for (auto [count, each] : {std::pair<long, long>{1, 1}, {45, 1}, {128, 1}, {3, 45}, {2, 16}}) {
            Random random(static_cast<std::uint64_t>(count));
            const long rows = 20, size = count * each, stride = count + 7;
            Numbers x(dtype, rows * size, random), gates(dtype, rows * stride, random, 30);
            std::vector<double> given;
            for (long i = 0; i < rows * size; ++i) given.push_back(x[i]);
            Case results("gates of " + std::to_string(each) + " of " + std::to_string(size) + ", " + name_of(dtype));
            kernels->gate({x.data(), gates.data(), rows, count, each, stride, dtype, 2});
            for (long i = 0; i < rows * size; ++i) {
                double expected = given[static_cast<std::size_t>(i)] / (1 + std::exp(-gates[i / size * stride + i % size / each]));
                results.compare(x[i], expected, 1e-7 + std::fabs(expected) * (dtype == FLOAT32 ? 1e-5 : 0x1p-8));
            }
            results.require(x.intact(), "memory behind the rows was written");
        }
}
