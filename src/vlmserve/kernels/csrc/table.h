// The functions of every instruction set, each compiled once per set.
#pragma once

#include <cstdint>

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };

// `weight_bits` of superblocks: each tile stores its own.
constexpr int SUPERBLOCKS = 1;
// `weight_bits` of groups of 4-bit codes (quantized_layout.h).
constexpr int CODED_GROUPS = 2;

// A part of an adapter's `up` matrix: what it adds to panels of 16 outputs.
struct AdapterPart {
    const void* weights;  // for each panel [count / 2][16][2] of bfloat16, or [count][16] of float32
    long panel, panels;   // the first panel, and how many
    long step;            // between panels, 1 or 2
    long first, count;    // the outputs of `down` to multiply by, an even number
};

// An adapter's change of a linear, before bias and activation: y = factor * (w x + up (down x)) + shift.
struct Adapter {
    const void* down;             // [rank / 16] panels, packed by `pack`
    long rank;                    // a multiple of 16
    const float* factor;          // [panels][16]; null: 1 and no shift
    const float* shift;           // likewise
    const std::int32_t* columns;  // [rank]: the scaling of each `down` output; null: not scaled
    long num_parts;
    AdapterPart parts[1];
};

// The adapters of a layer by slot; null if an adapter does not change it.
struct Adapters {
    long most_rank;  // maximum over all adapters
    const Adapter* slots[1];
};

// Rows with the adapter of one slot: `first` to `last` in sorted order.
struct SlotRows {
    long slot, first, last;
};

// A batch's rows with adapters, grouped by adapter.
struct AdaptedRows {
    const std::int32_t* order;
    const SlotRows* groups;
    long count;  // number of groups
};

// y = activation(x w^T + bias), or with gates and ups activation(gate) * up, plus residual.
struct LinearArgs {
    const void* x;         // [rows, in] of `dtype`, rows `x_stride` elements apart
    const void* weight;    // packed by `pack` or `pack_quantized`
    const void* bias;      // [out] of `dtype`, or null; gates, then ups, if gated
    const void* residual;  // like y, rows `y_stride` elements apart, or null; may be y itself
    void* y;               // [rows, out] ([rows, out / 2] if gated) of `dtype`, or float32 if `float_output`
    void* scratch;         // `linear_scratch` bytes
    long rows, in, out, x_stride, y_stride;
    int dtype, activation, gated, float_output, threads;
    int weight_bits;  // 8, 4, CODED_GROUPS, SUPERBLOCKS, or 0 for weights of `dtype`
    int group;        // inputs that share a scale, a multiple of 16; 0: all (8-bit)
    int minimums;     // whether groups have minimums
    int input_bits;   // for low-bit weights, precision of rounded inputs: 16, or 8 if there is a kernel for it
    const Adapters* adapters;       // null: no adapters
    const std::int32_t* row_slots;  // adapter slot of each row, below 0: none; `slot_stride` (0 or 1) between rows
    long slot_stride;
    const float* scalings;  // `scaling_stride` elements between rows; null: no adapter is scaled
    long scaling_stride;
    const AdaptedRows* adapted;  // from `row_slots`; set by the kernels, as are the following
    float* shrunk;               // [rows, 4, most_rank], part of `scratch`
    const LinearArgs* next = nullptr;  // the next linear; null: unknown
    const std::int32_t* x_rows = nullptr;  // [rows]: the row of x for each row; null: unchanged
};

// An expert's packed weights, as in LinearArgs: gates and ups, then the second matmul.
struct Expert {
    const void *up, *down;  // null: another rank has them
};

// The format of all experts' weights of a layer, as in LinearArgs.
struct ExpertForm {
    long weight_bits, group, minimums, input_bits;
};

// A router and its experts. Mirrored in kernels/cpu_experts.py.
struct ExpertsLayer {
    const void* router;       // float32 [count, size], packed by `pack`
    const float* correction;  // [count], added to scores for selection only; null: none
    const Expert* experts;    // [count]
    const float* router_norm;  // [size], RMSNorm weight of the router's input; null: none
    const float* input_norm;   // the same for the experts' input
    const float* factors;      // [count], factor of each expert's weight; null: 1
    double eps;                // of both norms
    long count, top_k, size, inner;
    long activation;    // of the gates
    long is_sigmoid;    // scores are sigmoids instead of a softmax
    long renormalized;  // a row's weights are divided by their sum
    double scale;       // factor of all weights
    ExpertForm up, down;
};

// y = the weighted sum of each row's experts, plus residual.
struct ExpertsArgs {
    const ExpertsLayer* layer;
    const void* x;         // [rows, size] of `dtype` contiguous
    const void* residual;  // like y, or null; may be y itself
    void* y;               // [rows, size] of `dtype`, or of float32 if `float_output`
    void* scratch;         // `experts_scratch(args)` bytes
    long rows;
    int dtype, float_output, threads;
    const LinearArgs* next = nullptr;  // the next linear; null: unknown
};

// y = norm(x) + residual. A row has `groups` adjacent vectors, each normed separately.
struct NormArgs {
    const void* x;         // [rows, groups, size] of `dtype`, rows `stride` elements apart
    const float* weight;   // [groups, size], or [size] for all groups if `weight_stride` is 0
    const float* bias;     // like the weight, or null
    const void* residual;  // like y, or null
    void* y;               // like x; may be x itself
    long rows, groups, size, stride, weight_stride;
    float eps;
    int centered;  // subtract the mean, as LayerNorm does
    int dtype, threads;
};

// x = sigmoid(gates) * x.
struct GateArgs {
    void* x;            // [rows, gates_of_row, each] of `dtype`, multiplied in place
    const void* gates;  // [rows, gates_of_row] of `dtype`, rows `gate_stride` elements apart
    long rows, gates_of_row, each, gate_stride;
    int dtype, threads;
};

// y = factor * x * by.
struct MultiplyArgs {
    const void* x;   // [rows, width] of `dtype`, rows `x_stride` elements apart
    const void* by;  // like x, rows `by_stride` elements apart; null: 1
    void* y;         // [rows, width] of `dtype` contiguous; may be x or by if that is as wide
    float factor;
    long rows, width, x_stride, by_stride;
    int dtype, threads;
};

// Maximum elements of a head.
constexpr long MAX_HEAD_SIZE = 512;

// Writes new keys and values to a paged cache and attends causally. Sequence `s` owns rows `query_starts[s] <= row <
// query_starts[s + 1]`; its last row has position `context_lens[s] - 1`.
struct AttentionArgs {
    const void* query;  // [tokens, heads, head_size] of `dtype`, tokens `query_stride` elements apart
    const void* key;    // [tokens, kv_heads, head_size]; null: the cache has all keys and values
    const void* value;  // like `key`
    const float* cos;   // [rows, rope_size / 2]; null: queries and keys are already rotated
    const float* sin;
    const std::int64_t* positions;  // [tokens]: the row of each token; null: token i uses row i
    void* keys;    // the cache: [blocks, kv_heads, tiles of a block, head_size * 16]
    void* values;  // [blocks, kv_heads, tiles of a block, head_size rounded up to 16 * 16]
    float* scales;  // [blocks, kv_heads, tiles of a block, 2, 16] of 8-bit keys and values; null: they are of `dtype`
    void* output;  // [tokens, heads * head_size] contiguous
    const std::int32_t* query_starts;
    const std::int32_t* context_lens;
    const std::int32_t* block_tables;  // `table_stride` elements between sequences
    const std::int64_t* slots;         // [tokens]: block * block_size + offset into the block
    const std::int32_t* ahead;         // [sequences]: positions from a sequence's token to the last one it sees, which
                                       // `context_lens` includes and `window` does not; null: 0
    void* scratch;                     // `attention_scratch(args)` bytes
    long sequences, tokens, heads, kv_heads, head_size, block_size, table_stride;
    long query_stride, key_stride, value_stride;
    long rope_size;  // elements of a head to rotate, from its start
    long window;     // positions that a token attends to, including itself; 0: all
    float scale, soft_cap;  // soft_cap 0: none
    int dtype, threads;
};

// A step's rows by the states that they read and write, see kernels/states.py.
struct StateRows {
    const std::int32_t* starts;     // [segments + 1]: first row of each segment
    const std::int32_t* sources;    // [segments]: slot of the state before it; below 0: zeros
    const std::int32_t* targets;    // [segments]: slot that gets the state after it
    const std::int32_t* positions;  // [segments]: tokens of the sequence before it
    const std::int32_t* sequences;  // [count + 1]: first segment of each sequence
    // [segments][3]: first row in `drafts`, how many of its rows precede the segment, and how many of the segment's last rows are
    // drafts, which change no state and replace the rows in `drafts`. Null: no drafts.
    const std::int32_t* drafts;
    long count;
};

// Maximum rows that a causal convolution reads.
constexpr long MAX_KERNEL = 8;

// A layer's gated delta rule, from its convolution to its gated norm. Head sizes are multiples of 16.
struct DeltaArgs {
    const void* mixed;         // [tokens, q | k | v | z] of `dtype`
    const void* gates;         // [tokens, b | a] of `dtype`
    const float* convolution;  // [kernel][channels of q, k and v]
    const float* decay;        // [value_heads]: -exp(A_log)
    const float* dt_bias;      // [value_heads]
    const float* norm;         // [value_size]
    float* states;             // [slots][value_heads][key_size][value_size]
    void* tail;                // [slots][kernel - 1][channels] of `dtype`, oldest first
    void* drafts;              // [rows][q | k | v | b | a] of `dtype`; null: never any
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
    void* tail;           // [slots][kernel - 1][channels] of `dtype`, oldest first
    void* drafts;         // [rows][channels] of `dtype`, B * x; null: never any
    void* output;         // [tokens, channels] of `dtype`
    StateRows rows;
    long channels, kernel;
    int dtype, threads;
};

// MACs with weights, as a linear counts them.
inline long experts_work(const ExpertsArgs& args) {
    const ExpertsLayer& layer = *args.layer;
    return args.rows * (layer.count + 3 * layer.top_k * layer.inner) * layer.size / 16;
}

enum OperationKind : long {
    NORM = 0, LINEAR = 1, ATTENTION = 2, DELTA = 3, CONVOLUTION = 4, GATE = 5, MULTIPLY = 6, EXPERTS = 7
};

// One operation of a program, in words of eight bytes. Operands are buffer numbers. Mirrored in kernels/cpu_record.py.
//
// - LINEAR, NORM: `weight`, `bias` and sizes as in their arguments. A norm's size is `in_features`.
// - ATTENTION: reads from element `first` of a row on.
// - GATE: `residual` holds the gates, `in_features` is their number, and `head_size` elements share one.
// - MULTIPLY: multiplies by `residual` (-1: 1) and by the float32 factor `weight` (null: 1). `in_features` is the number of
//   columns. `first` is the first element of `residual`, or of the source without one.
// - DELTA: `residual` holds b and a, `weight` is the norm's. heads, kv_heads and head_size are those of values and of keys.
// - EXPERTS: `residual` as in LINEAR.
struct Operation {
    long kind, source, target;
    long residual;  // -1: none; may be the target
    const void *weight, *bias;
    long in_features, out_features;
    long first;                  // first element of a row that norms, gates and attention read
    long groups, weight_stride;  // of norms
    long centered;
    long activation, gated, weight_bits, group, minimums, input_bits;
    double eps;                    // of norms
    void *keys, *values, *scales;  // of attention, as are the following
    long heads, kv_heads, head_size, block_size, rope_size, window;
    double scale, soft_cap;
    long rope;                 // kind of cosines and sines; -1: none
    long column;               // column of block tables and slots
    long is_sharing;           // the source only has queries, because the cache has all keys and values
    long is_causal;            // no token sees a later one, regardless of `ahead`
    long plan;                 // shared by operations of equal shapes; numbered in order of first use
    const Adapters* adapters;  // of linears; null: never any
    const void *convolution, *decay, *dt_bias;  // of the delta rule
    void *states, *tail, *drafts;               // of the delta rule and of convolutions
    long value_size, kernel;                    // of the delta rule and of convolutions
    const ExpertsLayer* experts;
};

// Operations over buffers of a row per token, in order, all of `dtype`. Norms without a residual may have the source as their
// target, and keep elements that they do not norm. Gates always have the source as their target. The source of attention is
// adjacent queries, keys and values.
struct ProgramArgs {
    const Operation* operations;
    const long* widths;         // elements of each buffer; the first is the input, the second the output
    const void* input;          // [tokens, width] contiguous
    void* output;
    const void* const* ropes;  // cosines, sines and positions of each kind, as in AttentionArgs
    const std::int32_t* query_starts;  // these as in AttentionArgs
    const std::int32_t* context_lens;
    const std::int32_t* block_tables;  // `column_stride` elements between columns
    const std::int64_t* slots;         // [columns, tokens]
    const std::int32_t* ahead;
    const std::int32_t* causal_lens;  // context lengths without positions ahead
    StateRows states;  // for the delta rule and convolutions
    const std::int32_t* row_slots;  // [tokens]: as in LinearArgs; null: no adapters
    const float* scalings;  // as in LinearArgs
    long scaling_stride;
    void* scratch;  // `program_scratch(args)` bytes
    long count, buffers, sequences, tokens, table_stride, column_stride;
    int dtype, threads;
};

// Limits of a program.
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
    void* qkv;         // [rows, heads, head_size], rotated in place; rows `stride` elements apart
    const float* cos;  // [rows, head_size / 2]; element i of a head pairs with i + head_size / 2
    const float* sin;
    long rows, heads, head_size, stride;
    int dtype, threads;
};

// Sampling options. All arrays except `logits` have an element per row.
struct SamplingArgs {
    const float* logits;  // [rows, vocabulary] contiguous
    const float* temperatures;  // 0: the first most likely token
    const float* top_ps;
    const float* min_ps;
    const long* top_ks;     // 0: all
    const double* numbers;  // uniform in [0, 1)
    std::int64_t* tokens;   // sampled tokens, -1 for NaN or no finite maximum
    void* scratch;          // `sampling_scratch` bytes
    long rows, vocabulary;
    int threads;
};

struct Kernels {
    const char* isa;
    void (*pack)(const void* weight, void* packed, long out, long in, int dtype, int gated, int threads);
    void (*pack_quantized)(const std::uint8_t* weight, const float* scales, const float* minimums, std::uint8_t* packed, long out,
                           long in, int bits, long group, int gated, int threads);
    // Packs GGUF blocks. kind: their GGUF type. first_tile: of superblocks, see superblocks_layout.h. offset: of the first
    // tile. ups: blocks of the second half of gated outputs; null: they follow the gates.
    void (*pack_blocks)(const std::uint8_t* blocks, const std::uint8_t* ups, std::uint8_t* packed, long out, long in, int kind,
                        long first_tile, long offset, int gated, int threads);
    // Whether superblock matmuls are supported.
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
