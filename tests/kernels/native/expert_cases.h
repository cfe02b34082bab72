// Mixtures of experts in float64. Router's scores are far apart, so that rounding changes no choice.
#pragma once

#include <algorithm>

#include "products.h"

inline void test_experts(WeightKind kind, int dtype, bool is_sigmoid) {
    const long count = 5, top_k = 2, size = 64, inner = 32, rows = 45, group = kind.groups ? 32 : 0;
    Random random(21);
    Case results(std::string("experts, ") + kind.name + ", " + name_of(dtype) + (is_sigmoid ? ", sigmoids" : ", softmax"));
    std::vector<Weight> ups, downs;
    for (long i = 0; i < count; ++i) {
        ups.emplace_back(kind, dtype, 2 * inner, size, group, true, random);
        downs.emplace_back(kind, dtype, size, inner, group, false, random);
    }
    // Expert 3 is another rank's.
    std::vector<Expert> table;
    for (long i = 0; i < count; ++i)
        table.push_back(i == 3 ? Expert{nullptr, nullptr} : Expert{ups[i].packed->data(), downs[i].packed->data()});
    Numbers x(dtype, rows * size, random), residual(dtype, rows * size, random), router(FLOAT32, count * size),
        correction(FLOAT32, count, random), y(dtype, rows * size);
    for (long i = 0; i < count * size; ++i) router.set(i, 0);
    // The first inputs alone are read, and are the experts' logits.
    for (long i = 0; i < count; ++i) router.set(i * size + i, 1);
    for (long row = 0; row < rows; ++row)
        for (long i = 0; i < count; ++i) x.set(row * size + i, static_cast<float>((row + i * (1 + row % 4)) % count) / 4 - 0.5f);
    for (long i = 0; i < count; ++i) correction.set(i, static_cast<float>(i % 2));
    Memory packed((count + 31) / 32 * 32 * size * 4);
    kernels->pack(router.data(), packed.data(), count, size, FLOAT32, 0, 2);
    const ExpertForm form = {kind.bits, group, kind.minimums, kind.input_bits};
    const ExpertsLayer layer = {packed.data(), is_sigmoid ? static_cast<const float*>(correction.data()) : nullptr, table.data(),
                                nullptr, nullptr, nullptr, 0, count, top_k, size, inner, 1, is_sigmoid, 1, 2.5, form, form};
    ExpertsArgs args = {};
    args.layer = &layer;
    args.dtype = dtype;
    args.threads = 2;
    auto run = [&](long first, long number) {
        args.x = x.at(first * size);
        args.residual = residual.at(first * size);
        args.y = y.at(first * size);
        args.rows = number;
        Memory scratch(kernels->experts_scratch(args), 0xff);
        args.scratch = scratch.data();
        kernels->experts(args);
        results.require(scratch.intact() && y.intact(), "memory behind an array was written");
    };
    run(7, 1);
    std::vector<double> alone;
    for (long i = 0; i < size; ++i) alone.push_back(y[7 * size + i]);
    run(0, rows);
    for (long i = 0; i < size; ++i)
        results.require(y[7 * size + i] == alone[static_cast<std::size_t>(i)], "a row depends on the others");
    for (long row = 0; row < rows; ++row) {
        std::vector<double> scores, expected, allowed;
        std::vector<long> order;
        double total = 0;
        for (long i = 0; i < count; ++i) {
            double logit = x[row * size + i];
            scores.push_back(is_sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit));
            order.push_back(i);
        }
        auto key = [&](long i) { return scores[static_cast<std::size_t>(i)] + (is_sigmoid ? correction[i] : 0); };
        std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return key(a) > key(b); });
        for (long i = 0; i < top_k; ++i) total += scores[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
        for (long column = 0; column < size; ++column) {
            expected.push_back(residual[row * size + column]);
            allowed.push_back(1e-5);
        }
        for (long chosen = 0; chosen < top_k; ++chosen) {
            const auto expert = static_cast<std::size_t>(order[static_cast<std::size_t>(chosen)]);
            if (!table[expert].up) continue;
            const double factor = 2.5 * scores[expert] / total;
            Numbers activations(dtype, inner);
            std::vector<double> errors;
            for (long i = 0; i < inner; ++i) {
                Dot gate = dot(ups[expert], x, row * size, i), up = dot(ups[expert], x, row * size, inner + i);
                double value = activated(1, gate.value);
                activations.set(i, static_cast<float>(value * up.value));
                errors.push_back(1.2 * gate.error * (std::fabs(up.value) + up.error) + up.error * std::fabs(value) +
                                 std::fabs(value * up.value) * (dtype == FLOAT32 ? 1e-5 : 0x1p-7));
            }
            for (long column = 0; column < size; ++column) {
                Dot down = dot(downs[expert], activations, 0, column);
                for (long i = 0; i < inner; ++i)
                    down.error += std::fabs(downs[expert].at(column, i)) * errors[static_cast<std::size_t>(i)];
                expected[static_cast<std::size_t>(column)] += factor * down.value;
                allowed[static_cast<std::size_t>(column)] += factor * (down.error + 1e-5 * std::fabs(down.value));
            }
        }
        for (long column = 0; column < size; ++column) {
            double wanted = expected[static_cast<std::size_t>(column)];
            results.compare(y[row * size + column], wanted,
                            allowed[static_cast<std::size_t>(column)] + (dtype == FLOAT32 ? 0 : std::fabs(wanted) * 0x1p-7));
        }
    }
}

inline void test_mixtures() {
    for (int dtype : {FLOAT32, BFLOAT16})
        for (const WeightKind& kind : {PLAIN, INT8, INT4, INT4_WIDE, GROUPS_WITH_MINIMUMS, CODES})
            test_experts(kind, dtype, kind.bits == 0);
    test_experts(PLAIN, FLOAT32, false);
}
