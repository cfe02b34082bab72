// What every instruction set offers: the same functions, compiled once for each.
#pragma once

#include <cstdint>

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };

// `weight_bits` of superblocks: each tile says its own.
constexpr int SUPERBLOCKS = 1;
// `weight_bits` of weights in groups that are codes of 4 bits (quantized_layout.h).
constexpr int CODED_GROUPS = 2;

// A part of an adapter's second factor: what it adds to panels of 16 of a product's outputs.
struct AdapterPart {
    const void* weights;  // for each panel [count / 2][16][2] of bfloat16, or [count][16] of float32
    long panel, panels;   // from which panel on, and how many
    long step;            // from one to the next, 1 or 2
    long first, count;    // which outputs of the first factor they are multiplied with, an even number
};

// What an adapter changes in a product, before bias and activation: y = factor * (w x + up (down x)) + shift.
struct Adapter {
    const void* down;             // [rank / 16] panels, as `pack` leaves them
    long rank;                    // a multiple of 16
    const float* factor;          // [panels][16]; null: 1 and no shift
    const float* shift;           // likewise
    const std::int32_t* columns;  // [rank]: of a row's scalings, for each output of the first factor; null: not scaled
    long num_parts;
    AdapterPart parts[1];
};

// The adapters of a layer by their slots; null where one does not change it.
struct Adapters {
    long most_rank;  // of them all
    const Adapter* slots[1];
};

// Rows with the adapter of the same slot: `first` to `last` in order.
struct SlotRows {
    long slot, first, last;
};

// The rows of a batch that have adapters, those with the same one together.
struct AdaptedRows {
    const std::int32_t* order;
    const SlotRows* groups;
    long count;  // of the groups
};

// y = activation(x w^T + bias), or, where that holds gates and ups, activation(gate) * up; plus residual.
struct LinearArgs {
    const void* x;         // [rows, in] of `dtype`, `x_stride` elements from row to row
    const void* weight;    // as `pack` or `pack_quantized` leaves it
    const void* bias;      // [out] of `dtype`, or null; of gates, then of ups, if gated
    const void* residual;  // as y, `y_stride` elements from row to row, or null; may be y itself
    void* y;               // [rows, out] ([rows, out / 2] if gated) of `dtype`, or float32 if `float_output`
    void* scratch;         // `linear_scratch` bytes
    long rows, in, out, x_stride, y_stride;
    int dtype, activation, gated, float_output, threads;
    int weight_bits;  // 8, 4, CODED_GROUPS, SUPERBLOCKS, or 0 for weights of `dtype`
    int group;        // how many inputs share a scale, a multiple of 16; 0: all of them, with 8 bits
    int minimums;     // in groups: whether these have minimums
    int input_bits;   // beside few bits, what inputs are rounded to where they are: 16, or 8 if there is a kernel for it
    const Adapters* adapters;       // null: rows have none
    const std::int32_t* row_slots;  // the slot of each row's adapter, below 0: none; `slot_stride` from row to row, 0 or 1
    long slot_stride;
    const float* scalings;  // `scaling_stride` elements from row to row; null: no adapter is scaled
    long scaling_stride;
    const AdaptedRows* adapted;  // by `row_slots`; the kernels' own, as what follows
    float* shrunk;               // [rows, 4, most_rank], part of `scratch`
    const LinearArgs* next = nullptr;  // the product that follows; null: not known
    const std::int32_t* x_rows = nullptr;  // [rows]: which row of x each row is; null: its own number
};

// Packed weights of an expert, as in LinearArgs: gates and ups, and what their result is multiplied with.
struct Expert {
    const void *up, *down;  // null: another rank has them
};

// How weights of all experts of a layer are packed, as in LinearArgs.
struct ExpertForm {
    long weight_bits, group, minimums, input_bits;
};

// A router and its experts. kernels/cpu_experts.py has its twin.
struct ExpertsLayer {
    const void* router;       // float32 [count, size], as `pack` leaves it
    const float* correction;  // [count], added to scores to choose experts, not to weigh them; null: none
    const Expert* experts;    // [count]
    const float* router_norm;  // [size], weights of an RMSNorm of the rows that the router takes; null: none
    const float* input_norm;   // likewise of the rows that experts take
    const float* factors;      // [count], of the weights of each expert; null: 1
    double eps;                // of both norms
    long count, top_k, size, inner;
    long activation;    // of gates
    long is_sigmoid;    // scores are sigmoids instead of a softmax
    long renormalized;  // scores of a row's experts are divided by their sum
    double scale;       // factor of the weights of experts
    ExpertForm up, down;
};

// y = the weighted sum of what each row's experts compute, plus residual.
struct ExpertsArgs {
    const ExpertsLayer* layer;
    const void* x;         // [rows, size] of `dtype` contiguous
    const void* residual;  // as y, or null; may be y itself
    void* y;               // [rows, size] of `dtype`, or of float32 if `float_output`
    void* scratch;         // `experts_scratch(args)` bytes
    long rows;
    int dtype, float_output, threads;
    const LinearArgs* next = nullptr;  // the product that follows; null: not known
};

// y = norm(x) + residual. A row holds `groups` vectors side by side, each normed by itself.
struct NormArgs {
    const void* x;         // [rows, groups, size] of `dtype`, `stride` elements from row to row
    const float* weight;   // [groups, size], or [size] for all groups if `weight_stride` is 0
    const float* bias;     // as the weight, or null
    const void* residual;  // as y, or null
    void* y;               // as x; may be x itself
    long rows, groups, size, stride, weight_stride;
    float eps;
    int centered;  // subtract the mean, as LayerNorm does
    int dtype, threads;
};

// x = sigmoid(gates) * x.
struct GateArgs {
    void* x;            // [rows, gates_of_row, each] of `dtype`, multiplied in place
    const void* gates;  // [rows, gates_of_row] of `dtype`, `gate_stride` elements from row to row
    long rows, gates_of_row, each, gate_stride;
    int dtype, threads;
};

// y = factor * x * by.
struct MultiplyArgs {
    const void* x;   // [rows, width] of `dtype`, `x_stride` elements from row to row
    const void* by;  // as x, `by_stride` elements from row to row; null: 1
    void* y;         // [rows, width] of `dtype` contiguous; may be x or by if that is as wide
    float factor;
    long rows, width, x_stride, by_stride;
    int dtype, threads;
};

// Elements of a head at most.
constexpr long MAX_HEAD_SIZE = 512;

// Writes new keys and values into a paged cache and attends over it, causally. Token `t` of sequence `s` is a row
// `query_starts[s] <= row < query_starts[s + 1]`; its newest one is at position `context_lens[s] - 1`.
struct AttentionArgs {
    const void* query;  // [tokens, heads, head_size] of `dtype`, `query_stride` elements from token to token
    const void* key;    // [tokens, kv_heads, head_size]; null: the cache has all keys and values
    const void* value;  // as `key`
    const float* cos;   // [rows, rope_size / 2]: queries and keys are still to be rotated; null: they are already
    const float* sin;
    const std::int64_t* positions;  // [tokens]: the row of each token; null: its own number
    void* keys;    // the cache: [blocks, kv_heads, tiles of a block, head_size * 16]
    void* values;  // [blocks, kv_heads, tiles of a block, head_size rounded up to 16 * 16]
    float* scales;  // [blocks, kv_heads, tiles of a block, 2, 16] of keys and values in 8 bits; null: they are of `dtype`
    void* output;  // [tokens, heads * head_size] contiguous
    const std::int32_t* query_starts;
    const std::int32_t* context_lens;
    const std::int32_t* block_tables;  // `table_stride` elements from sequence to sequence
    const std::int64_t* slots;         // [tokens]: block * block_size + offset into the block
    const std::int32_t* ahead;         // [sequences]: positions from a sequence's token to the last one it sees, which
                                       // `context_lens` includes and `window` does not; null: 0
    void* scratch;                     // `attention_scratch(args)` bytes
    long sequences, tokens, heads, kv_heads, head_size, block_size, table_stride;
    long query_stride, key_stride, value_stride;
    long rope_size;  // elements of a head that are rotated, from its beginning
    long window;     // positions that a token attends to, itself included; 0: all
    float scale, soft_cap;  // soft_cap 0: none
    int dtype, threads;
};

// Rows of a step by the states that they read and write, as kernels/states.py describes them.
struct StateRows {
    const std::int32_t* starts;     // [segments + 1]: first row of each segment
    const std::int32_t* sources;    // [segments]: slot of the state before it; below 0: zeros
    const std::int32_t* targets;    // [segments]: slot that gets the state after it
    const std::int32_t* positions;  // [segments]: tokens of the sequence before it
    const std::int32_t* sequences;  // [count + 1]: first segment of each sequence
    long count;
};

// Rows that a causal convolution reads at most.
constexpr long MAX_KERNEL = 8;

// The gated delta rule of a layer, from its convolution to its gated norm. Sizes of heads are multiples of 16.
struct DeltaArgs {
    const void* mixed;         // [tokens, q | k | v | z] of `dtype`
    const void* gates;         // [tokens, b | a] of `dtype`
    const float* convolution;  // [kernel][channels of q, k and v]
    const float* decay;        // [value_heads]: -exp(A_log)
    const float* dt_bias;      // [value_heads]
    const float* norm;         // [value_size]
    float* states;             // [slots][value_heads][key_size][value_size]
    void* tail;                // [slots][kernel - 1][channels] of `dtype`, the oldest first
    void* output;              // [tokens, value_heads * value_size] of `dtype`
    StateRows rows;
    void* scratch;  // `delta_scratch(args)` bytes
    long key_heads, value_heads, key_size, value_size, kernel;
    float eps;  // of the norm
    int dtype, threads;
};

// A gated short convolution, C * convolution(B * x).
struct ConvolutionArgs {
    const void* mixed;    // [tokens, B | C | x] of `dtype`
    const float* weight;  // [kernel][channels]
    void* tail;           // [slots][kernel - 1][channels] of `dtype`, the oldest first
    void* output;         // [tokens, channels] of `dtype`
    StateRows rows;
    long channels, kernel;
    int dtype, threads;
};

// Multiplications with weights, as a product counts them.
inline long experts_work(const ExpertsArgs& args) {
    const ExpertsLayer& layer = *args.layer;
    return args.rows * (layer.count + 3 * layer.top_k * layer.inner) * layer.size / 16;
}

enum OperationKind : long {
    NORM = 0, LINEAR = 1, ATTENTION = 2, DELTA = 3, CONVOLUTION = 4, GATE = 5, MULTIPLY = 6, EXPERTS = 7
};

// One operation of a program, in words of eight bytes. Operands are numbers of buffers. kernels/cpu_record.py has its twin.
struct Operation {
    long kind, source, target;
    long residual;                          // of norms and products; -1: none. It may be the target. Of gates: their rows.
                                            // Of multiplications: what the source is multiplied by; -1: 1. Of the delta
                                            // rule: b and a
    const void *weight, *bias;              // of norms and products, as their arguments have them. Of multiplications, the
                                            // weight is a float32 factor; null: 1
    long in_features, out_features;         // of products; of norms, the first is the size, of gates, their number, of
                                            // multiplications, their columns
    long first;                             // element of a row from which norms, gates and attention read. Of
                                            // multiplications: of the residual, or of the source if there is none
    long groups, weight_stride;             // of norms, as their arguments have them
    long centered;
    long activation, gated, weight_bits, group, minimums, input_bits;
    double eps;                             // of norms
    void *keys, *values, *scales;           // of attention, as the rest
    long heads, kv_heads, head_size, block_size, rope_size, window;
    double scale, soft_cap;
    long rope;  // which cosines and sines; -1: none
    long column;  // which block tables and slots
    long is_sharing;  // the source is queries alone, since the cache has all keys and values
    long is_causal;   // no token sees a later one, whatever `ahead` says
    long plan;  // operations of equal shapes share one; numbered in order of first use
    const Adapters* adapters;  // of products; null: none ever
    const void *convolution, *decay, *dt_bias;  // of the delta rule, as its arguments have them; its norm is the weight
    void *states, *tail;                        // of the delta rule and of convolutions
    long value_size, kernel;                    // likewise; heads, kv_heads and head_size are those of values and of keys.
                                                // Of gates, head_size elements share one
    const ExpertsLayer* experts;  // of experts; their residual is as that of products
};

// Operations over buffers of a row a token, one after another, all of `dtype`. Norms without a residual may have the
// source as their target; elements that they do not norm stay. Gates always have the source as their target. The source of
// attention is queries, keys and values side by side.
struct ProgramArgs {
    const Operation* operations;
    const long* widths;         // of buffers, in elements; the first is the input, the second the output
    const void* input;          // [tokens, width] contiguous
    void* output;
    const void* const* ropes;  // cosines, sines and positions of each kind, as in AttentionArgs
    const std::int32_t* query_starts;  // these as in AttentionArgs
    const std::int32_t* context_lens;
    const std::int32_t* block_tables;  // `column_stride` elements from column to column
    const std::int64_t* slots;         // [columns, tokens]
    const std::int32_t* ahead;
    const std::int32_t* causal_lens;  // context lengths without what is ahead
    StateRows states;  // for the delta rule and convolutions
    const std::int32_t* row_slots;  // [tokens]: as in LinearArgs; null: no row has an adapter
    const float* scalings;  // as in LinearArgs
    long scaling_stride;
    void* scratch;  // `program_scratch(args)` bytes
    long count, buffers, sequences, tokens, table_stride, column_stride;
    int dtype, threads;
};

// What a program has at most.
constexpr long MAX_BUFFERS = 16, MAX_PLANS = 8;

struct EncoderAttentionArgs {
    const void* qkv;  // [images, length, 3, heads, head_size] contiguous
    void* y;          // [images, last - first, heads, head_size] contiguous
    void* scratch;    // `encoder_attention_scratch` bytes
    long images, length, heads, head_size;
    long first, last;  // queries of each image: first <= query < last
    float scale;       // of scores, above 0
    int dtype, threads;
};

struct RotationArgs {
    void* qkv;         // [rows, heads, head_size], rotated in place; `stride` elements from row to row
    const float* cos;  // [rows, head_size / 2]; element i of a head pairs with i + head_size / 2
    const float* sin;
    long rows, heads, head_size, stride;
    int dtype, threads;
};

// How to draw a token from each row of logits; all arrays but `logits` have an element a row.
struct SamplingArgs {
    const float* logits;  // [rows, vocabulary] contiguous
    const float* temperatures;  // 0: the first of the highest
    const float* top_ps;
    const float* min_ps;
    const long* top_ks;     // 0: all
    const double* numbers;  // uniform in [0, 1)
    std::int64_t* tokens;   // what is drawn, -1 where there is a NaN or no finite maximum
    void* scratch;          // `sampling_scratch` bytes
    long rows, vocabulary;
    int threads;
};

struct Kernels {
    const char* isa;
    void (*pack)(const void* weight, void* packed, long out, long in, int dtype, int gated, int threads);
    void (*pack_quantized)(const std::uint8_t* weight, const float* scales, const float* minimums, std::uint8_t* packed, long out,
                           long in, int bits, long group, int gated, int threads);
    // Packs blocks of a GGUF file. kind: their type there. first_tile: of superblocks, see superblocks_layout.h. offset: of the
    // first tile. ups: blocks of the second half of gated outputs; null: they follow the gates'.
    void (*pack_blocks)(const std::uint8_t* blocks, const std::uint8_t* ups, std::uint8_t* packed, long out, long in, int kind,
                        long first_tile, long offset, int gated, int threads);
    // Whether there are products with superblocks.
    bool has_superblocks;
    // Bits, group and minimums: as in LinearArgs.
    void (*gather)(const void* packed, const std::int64_t* ids, void* y, long count, long in, int dtype, int bits, long group,
                   int minimums, int threads);
    long (*linear_scratch)(const LinearArgs&);
    void (*linear)(const LinearArgs&);
    void (*norm)(const NormArgs&);
    void (*gate)(const GateArgs&);
    long (*attention_scratch)(const AttentionArgs&, long* work);
    void (*attention)(const AttentionArgs&);
    long (*encoder_attention_scratch)(const EncoderAttentionArgs&);
    void (*encoder_attention)(const EncoderAttentionArgs&);
    void (*rotation)(const RotationArgs&);
    long (*delta_scratch)(const DeltaArgs&);
    void (*delta)(const DeltaArgs&);
    void (*convolution)(const ConvolutionArgs&);
    long (*experts_scratch)(const ExpertsArgs&);
    void (*experts)(const ExpertsArgs&);
    long (*program_scratch)(const ProgramArgs&, long* work);
    void (*program)(const ProgramArgs&);
    long (*sampling_scratch)(const SamplingArgs&);
    void (*sampling)(const SamplingArgs&);
};
