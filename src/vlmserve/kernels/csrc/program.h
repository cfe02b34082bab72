// Runs all layers of a model in one call, as a list of operations.
//
// This pays the overhead of a call (Python objects, waking threads) once per step. For a few tokens of a small model, it
// exceeds the kernels' time.
#pragma once

#include "attention.h"
#include "convolution.h"
#include "delta.h"
#include "experts.h"
#include "gate.h"
#include "multiply.h"
#include "norm.h"
#include "quantized.h"

namespace {

class Program {
public:
    // Computes the memory of each part.
    explicit Program(const ProgramArgs& args) : args_(args) {
        // Only the output is written. The other places are not known yet.
        for (char*& buffer : buffers_) buffer = static_cast<char*>(const_cast<void*>(args.input));
        buffers_[1] = static_cast<char*>(args.output);
        for (long i = 0; i < args.count; ++i) {
            const Operation& op = args.operations[i];
            if (op.kind == LINEAR) {
                shared_ = larger(shared_, product_scratch(linear_args(op)));
                work += args.tokens * op.in_features * op.out_features / 16;
            } else if (op.kind == ATTENTION && op.plan == num_plans_) {
                AttentionArgs shape = attention_args(op);
                Plan plan = plan_items(shape, Geometry(shape), nullptr);
                shared_ = larger(shared_, attention_memory(shape, plan));
                items_[num_plans_++] = item_bytes(plan);
            } else if (op.kind == DELTA) {
                shared_ = larger(shared_, delta_scratch(delta_args(op)));
                work += args.tokens * op.heads * op.head_size * op.value_size;
            } else if (op.kind == EXPERTS) {
                shared_ = larger(shared_, experts_scratch(experts_args(op)));
                work += experts_work(experts_args(op));
            }
        }
        shared_ = cache_lines(shared_);
    }

    long bytes() const {
        long total = shared_ + (args_.row_slots ? sorted_bytes(args_.tokens) : 0);
        for (long plan = 0; plan < num_plans_; ++plan) total += items_[plan];
        for (long buffer = 2; buffer < args_.buffers; ++buffer) total += buffer_bytes(buffer);
        return total;
    }

    void run() {
        char* memory = static_cast<char*>(args_.scratch);
        char* end = memory + shared_;
        if (args_.row_slots) {
            adapted_ = sort_rows(args_.row_slots, 1, args_.tokens, end);
            end += sorted_bytes(args_.tokens);
        }
        Item* items[MAX_PLANS];
        for (long plan = 0; plan < num_plans_; end += items_[plan++]) items[plan] = reinterpret_cast<Item*>(end);
        for (long buffer = 2; buffer < args_.buffers; end += buffer_bytes(buffer++)) buffers_[buffer] = end;

        Plan plans[MAX_PLANS];
        for (long i = 0, next = 0; i < args_.count && next < num_plans_; ++i) {
            const Operation& op = args_.operations[i];
            if (op.kind != ATTENTION || op.plan != next) continue;
            AttentionArgs shape = attention_args(op);
            plans[next] = plan_items(shape, Geometry(shape), items[next]);
            ++next;
        }
        for (long i = 0; i < args_.count; ++i) {
            const Operation& op = args_.operations[i];
            if (op.kind == NORM) {
                norm(norm_args(op));
            } else if (op.kind == LINEAR) {
                LinearArgs product = linear_args(op);
                product.scratch = memory;
                LinearArgs next;
                if (const Operation* following = product_behind(i)) {
                    next = linear_args(*following);
                    product.next = &next;
                }
                multiply_sorted(product);
            } else if (op.kind == DELTA) {
                DeltaArgs rule = delta_args(op);
                rule.scratch = memory;
                delta(rule);
            } else if (op.kind == CONVOLUTION) {
                convolution(convolution_args(op));
            } else if (op.kind == GATE) {
                gate(gate_args(op));
            } else if (op.kind == MULTIPLY) {
                multiply(multiply_args(op));
            } else if (op.kind == EXPERTS) {
                ExpertsArgs mixture = experts_args(op);
                mixture.scratch = memory;
                LinearArgs next;
                if (const Operation* following = product_behind(i)) {
                    next = linear_args(*following);
                    mixture.next = &next;
                }
                experts(mixture);
            } else {
                attend(attention_args(op), plans[op.plan], items[op.plan], memory);
            }
        }
    }

    long work = 0;  // MACs with weights, as a linear counts them

private:
    long buffer_bytes(long buffer) const {
        long element = args_.dtype == FLOAT32 ? 4 : 2;
        return cache_lines(args_.tokens * args_.widths[buffer] * element);
    }

    NormArgs norm_args(const Operation& op) const {
        long offset = op.first * (args_.dtype == FLOAT32 ? 4 : 2);
        NormArgs args;
        args.x = buffers_[op.source] + offset;
        args.weight = static_cast<const float*>(op.weight);
        args.bias = static_cast<const float*>(op.bias);
        args.residual = op.residual < 0 ? nullptr : buffers_[op.residual] + offset;
        args.y = buffers_[op.target] + offset;
        args.rows = args_.tokens;
        args.groups = op.groups;
        args.size = op.in_features;
        args.stride = args_.widths[op.source];
        args.weight_stride = op.weight_stride;
        args.eps = static_cast<float>(op.eps);
        args.centered = static_cast<int>(op.centered);
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    GateArgs gate_args(const Operation& op) const {
        GateArgs args;
        args.x = buffers_[op.source];
        args.gates = buffers_[op.residual] + op.first * (args_.dtype == FLOAT32 ? 4 : 2);
        args.rows = args_.tokens;
        args.gates_of_row = op.in_features;
        args.each = op.head_size;
        args.gate_stride = args_.widths[op.residual];
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    MultiplyArgs multiply_args(const Operation& op) const {
        long offset = op.first * (args_.dtype == FLOAT32 ? 4 : 2);
        bool has_other = op.residual >= 0;
        MultiplyArgs args;
        args.x = buffers_[op.source] + (has_other ? 0 : offset);
        args.by = has_other ? buffers_[op.residual] + offset : nullptr;
        args.y = buffers_[op.target];
        args.factor = op.weight ? *static_cast<const float*>(op.weight) : 1.0f;
        args.rows = args_.tokens;
        args.width = op.in_features;
        args.x_stride = args_.widths[op.source];
        args.by_stride = has_other ? args_.widths[op.residual] : 0;
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    LinearArgs linear_args(const Operation& op) const {
        LinearArgs args;
        args.x = buffers_[op.source];
        args.weight = op.weight;
        args.bias = op.bias;
        args.residual = op.residual < 0 ? nullptr : buffers_[op.residual];
        args.y = buffers_[op.target];
        args.scratch = nullptr;
        args.rows = args_.tokens;
        args.in = op.in_features;
        args.out = op.out_features;
        args.x_stride = op.in_features;
        args.y_stride = op.gated ? op.out_features / 2 : op.out_features;
        args.dtype = args_.dtype;
        args.activation = static_cast<int>(op.activation);
        args.gated = static_cast<int>(op.gated);
        args.float_output = 0;
        args.threads = args_.threads;
        args.weight_bits = static_cast<int>(op.weight_bits);
        args.group = static_cast<int>(op.group);
        args.minimums = static_cast<int>(op.minimums);
        args.input_bits = static_cast<int>(op.input_bits);
        args.adapters = args_.row_slots ? op.adapters : nullptr;
        args.row_slots = args_.row_slots;
        args.slot_stride = 1;
        args.scalings = args_.scalings;
        args.scaling_stride = args_.scaling_stride;
        args.adapted = &adapted_;
        return args;
    }

    // The next linear after an operation, or null. The next experts are not known yet.
    const Operation* product_behind(long number) const {
        for (++number; number < args_.count && args_.operations[number].kind != EXPERTS; ++number)
            if (args_.operations[number].kind == LINEAR) return &args_.operations[number];
        return nullptr;
    }

    ExpertsArgs experts_args(const Operation& op) const {
        ExpertsArgs args;
        args.layer = op.experts;
        args.x = buffers_[op.source];
        args.residual = op.residual < 0 ? nullptr : buffers_[op.residual];
        args.y = buffers_[op.target];
        args.scratch = nullptr;
        args.rows = args_.tokens;
        args.dtype = args_.dtype;
        args.float_output = 0;
        args.threads = args_.threads;
        return args;
    }

    AttentionArgs attention_args(const Operation& op) const {
        long element = args_.dtype == FLOAT32 ? 4 : 2;
        AttentionArgs args;
        const char* qkv = buffers_[op.source] + op.first * element;
        args.query = qkv;
        args.key = op.is_sharing ? nullptr : qkv + op.heads * op.head_size * element;
        args.value = op.is_sharing ? nullptr : qkv + (op.heads + op.kv_heads) * op.head_size * element;
        bool rotates = op.rope >= 0;
        args.cos = rotates ? static_cast<const float*>(args_.ropes[3 * op.rope]) : nullptr;
        args.sin = rotates ? static_cast<const float*>(args_.ropes[3 * op.rope + 1]) : nullptr;
        args.positions = rotates ? static_cast<const std::int64_t*>(args_.ropes[3 * op.rope + 2]) : nullptr;
        args.keys = op.keys;
        args.values = op.values;
        args.scales = static_cast<float*>(op.scales);
        args.output = buffers_[op.target];
        args.query_starts = args_.query_starts;
        args.context_lens = op.is_causal ? args_.causal_lens : args_.context_lens;
        args.block_tables = args_.block_tables + op.column * args_.column_stride;
        args.slots = args_.slots + op.column * args_.tokens;
        args.ahead = op.is_causal ? nullptr : args_.ahead;
        args.scratch = nullptr;
        args.sequences = args_.sequences;
        args.tokens = args_.tokens;
        args.heads = op.heads;
        args.kv_heads = op.kv_heads;
        args.head_size = op.head_size;
        args.block_size = op.block_size;
        args.table_stride = args_.table_stride;
        args.query_stride = args.key_stride = args.value_stride = args_.widths[op.source];
        args.rope_size = op.rope_size;
        args.window = op.window;
        args.scale = static_cast<float>(op.scale);
        args.soft_cap = static_cast<float>(op.soft_cap);
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    DeltaArgs delta_args(const Operation& op) const {
        DeltaArgs args;
        args.mixed = buffers_[op.source];
        args.gates = buffers_[op.residual];
        args.convolution = static_cast<const float*>(op.convolution);
        args.decay = static_cast<const float*>(op.decay);
        args.dt_bias = static_cast<const float*>(op.dt_bias);
        args.norm = static_cast<const float*>(op.weight);
        args.states = static_cast<float*>(op.states);
        args.tail = op.tail;
        args.drafts = op.drafts;
        args.output = buffers_[op.target];
        args.rows = args_.states;
        args.scratch = nullptr;
        args.key_heads = op.kv_heads;
        args.value_heads = op.heads;
        args.key_size = op.head_size;
        args.value_size = op.value_size;
        args.kernel = op.kernel;
        args.eps = static_cast<float>(op.eps);
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    ConvolutionArgs convolution_args(const Operation& op) const {
        ConvolutionArgs args;
        args.mixed = buffers_[op.source];
        args.weight = static_cast<const float*>(op.convolution);
        args.tail = op.tail;
        args.drafts = op.drafts;
        args.output = buffers_[op.target];
        args.rows = args_.states;
        args.channels = op.in_features;
        args.kernel = op.kernel;
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        return args;
    }

    const ProgramArgs& args_;
    AdaptedRows adapted_{};
    char* buffers_[MAX_BUFFERS];
    long shared_ = 0, num_plans_ = 0, items_[MAX_PLANS];  // bytes that operations share, and bytes of each plan's items
};

long program_scratch(const ProgramArgs& args, long* work) {
    Program program(args);
    *work = program.work;
    return program.bytes();
}

void program(const ProgramArgs& args) { Program(args).run(); }

}  // namespace
