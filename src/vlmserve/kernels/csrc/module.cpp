// The Python module. It takes addresses and sizes; callers must check shapes.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "isas.h"

namespace {

const Kernels* selected = nullptr;

// Calls with less work keep Python's lock, because getting it back could take longer.
constexpr long LONG_WORK = 1L << 24;

// Increment when arguments change, see kernels/extension.py.
constexpr long INTERFACE = 12;

// Positional arguments. All are integers or addresses, except where `number` is called.
class Arguments {
public:
    Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t wanted) : values_(values), ok_(count == wanted) {
        if (!ok_) PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, count);
    }
    long integer() {
        if (!ok_) return 0;
        long value = PyLong_AsLong(values_[next_++]);
        if (value == -1 && PyErr_Occurred()) ok_ = false;
        return value;
    }
    void* address() { return reinterpret_cast<void*>(integer()); }
    float number() {
        if (!ok_) return 0;
        double value = PyFloat_AsDouble(values_[next_++]);
        if (value == -1 && PyErr_Occurred()) ok_ = false;
        return static_cast<float>(value);
    }
    bool ok() const { return ok_; }

private:
    PyObject* const* values_;
    Py_ssize_t next_ = 0;
    bool ok_;
};

// Memory of the calling thread, reused by calls, because fresh memory costs more than most calls.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    void* of(long bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + 63) / 64 * 64;
            memory_ = std::aligned_alloc(64, static_cast<std::size_t>(size_));
            if (!memory_) size_ = 0;
        }
        return memory_;
    }

private:
    void* memory_ = nullptr;
    long size_ = 0;
};

void* scratch(long bytes) {
    static thread_local Scratch memory;
    return memory.of(bytes > 0 ? bytes : 64);
}

template <class Work>
PyObject* run(const Arguments& arguments, long work, Work call) {
    if (!arguments.ok()) return nullptr;
    if (work < LONG_WORK) {
        call();
    } else {
        Py_BEGIN_ALLOW_THREADS
        call();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject* supported_isas(PyObject*, PyObject*) {
    const Kernels* found[MOST_ISAS];
    int count = supported(found);
    PyObject* names = PyTuple_New(count);
    if (!names) return nullptr;
    for (int i = 0; i < count; ++i) PyTuple_SetItem(names, i, PyUnicode_FromString(found[i]->isa));
    return names;
}

PyObject* runnable_isas(PyObject*, PyObject*) {
    const char* found[MOST_ISAS];
    int count = runnable(found);
    PyObject* names = PyTuple_New(count);
    if (!names) return nullptr;
    for (int i = 0; i < count; ++i) PyTuple_SetItem(names, i, PyUnicode_FromString(found[i]));
    return names;
}

PyObject* selected_isa(PyObject*, PyObject*) { return PyUnicode_FromString(selected->isa); }

PyObject* select_isa(PyObject*, PyObject* name) {
    PyObject* bytes = PyUnicode_AsUTF8String(name);
    if (!bytes) return nullptr;
    const Kernels* found[MOST_ISAS];
    int count = supported(found);
    for (int i = 0; i < count; ++i) {
        if (std::strcmp(PyBytes_AsString(bytes), found[i]->isa) == 0) {
            selected = found[i];
            Py_DECREF(bytes);
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "this processor or this build has no %s kernels", PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return nullptr;
}

PyObject* pack(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 7);
    const void* weight = from.address();
    void* packed = from.address();
    long out = from.integer(), in = from.integer();
    int dtype = static_cast<int>(from.integer()), gated = static_cast<int>(from.integer());
    int threads = static_cast<int>(from.integer());
    return run(from, out * in, [&] { selected->pack(weight, packed, out, in, dtype, gated, threads); });
}

PyObject* pack_quantized(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 10);
    const auto* weight = static_cast<const std::uint8_t*>(from.address());
    const auto* scales = static_cast<const float*>(from.address());
    const auto* minimums = static_cast<const float*>(from.address());
    auto* packed = static_cast<std::uint8_t*>(from.address());
    long out = from.integer(), in = from.integer();
    int bits = static_cast<int>(from.integer());
    long group = from.integer();
    int gated = static_cast<int>(from.integer()), threads = static_cast<int>(from.integer());
    return run(from, out * in,
               [&] { selected->pack_quantized(weight, scales, minimums, packed, out, in, bits, group, gated, threads); });
}

PyObject* has_superblocks(PyObject*, PyObject*) { return PyBool_FromLong(selected->has_superblocks); }

PyObject* pack_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 10);
    const auto* blocks = static_cast<const std::uint8_t*>(from.address());
    const auto* ups = static_cast<const std::uint8_t*>(from.address());
    auto* packed = static_cast<std::uint8_t*>(from.address());
    long out = from.integer(), in = from.integer();
    int kind = static_cast<int>(from.integer());
    long first_tile = from.integer(), offset = from.integer();
    int gated = static_cast<int>(from.integer()), threads = static_cast<int>(from.integer());
    return run(from, out * in,
               [&] { selected->pack_blocks(blocks, ups, packed, out, in, kind, first_tile, offset, gated, threads); });
}

PyObject* gather(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 10);
    const void* packed = from.address();
    const auto* ids = static_cast<const std::int64_t*>(from.address());
    void* y = from.address();
    long rows = from.integer(), in = from.integer();
    int dtype = static_cast<int>(from.integer()), bits = static_cast<int>(from.integer());
    long group = from.integer();
    int minimums = static_cast<int>(from.integer()), threads = static_cast<int>(from.integer());
    return run(from, rows * in,
               [&] { selected->gather(packed, ids, y, rows, in, dtype, bits, group, minimums, threads); });
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 24);
    LinearArgs args;
    args.x = from.address();
    args.weight = from.address();
    args.bias = from.address();
    args.residual = from.address();
    args.y = from.address();
    args.rows = from.integer();
    args.in = from.integer();
    args.out = from.integer();
    args.x_stride = from.integer();
    args.y_stride = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.activation = static_cast<int>(from.integer());
    args.gated = static_cast<int>(from.integer());
    args.float_output = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    args.weight_bits = static_cast<int>(from.integer());
    args.group = static_cast<int>(from.integer());
    args.minimums = static_cast<int>(from.integer());
    args.input_bits = static_cast<int>(from.integer());
    args.adapters = static_cast<const Adapters*>(from.address());
    args.row_slots = static_cast<const std::int32_t*>(from.address());
    args.slot_stride = from.integer();
    args.scalings = static_cast<const float*>(from.address());
    args.scaling_stride = from.integer();
    if (from.ok()) {
        args.scratch = scratch(selected->linear_scratch(args));
        if (!args.scratch) return PyErr_NoMemory();
    }
    return run(from, args.rows * args.in * args.out / 16, [&] { selected->linear(args); });
}

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 14);
    NormArgs args;
    args.x = from.address();
    args.weight = static_cast<const float*>(from.address());
    args.bias = static_cast<const float*>(from.address());
    args.residual = from.address();
    args.y = from.address();
    for (long* size : {&args.rows, &args.groups, &args.size, &args.stride, &args.weight_stride}) *size = from.integer();
    args.eps = from.number();
    args.centered = static_cast<int>(from.integer());
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    return run(from, args.rows * args.groups * args.size, [&] { selected->norm(args); });
}

PyObject* gate(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 8);
    GateArgs args;
    args.x = from.address();
    args.gates = from.address();
    for (long* size : {&args.rows, &args.gates_of_row, &args.each, &args.gate_stride}) *size = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    return run(from, args.rows * args.gates_of_row * args.each, [&] { selected->gate(args); });
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 31);
    AttentionArgs args;
    args.query = from.address();
    args.key = from.address();
    args.value = from.address();
    args.cos = static_cast<const float*>(from.address());
    args.sin = static_cast<const float*>(from.address());
    args.positions = static_cast<const std::int64_t*>(from.address());
    args.keys = from.address();
    args.values = from.address();
    args.scales = static_cast<float*>(from.address());
    args.output = from.address();
    args.query_starts = static_cast<const std::int32_t*>(from.address());
    args.context_lens = static_cast<const std::int32_t*>(from.address());
    args.block_tables = static_cast<const std::int32_t*>(from.address());
    args.slots = static_cast<const std::int64_t*>(from.address());
    args.ahead = static_cast<const std::int32_t*>(from.address());
    for (long* size : {&args.sequences, &args.tokens, &args.heads, &args.kv_heads, &args.head_size, &args.block_size,
                       &args.table_stride, &args.query_stride, &args.key_stride, &args.value_stride, &args.rope_size,
                       &args.window})
        *size = from.integer();
    args.scale = from.number();
    args.soft_cap = from.number();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    long work = 0;
    if (from.ok()) {
        args.scratch = scratch(selected->attention_scratch(args, &work));
        if (!args.scratch) return PyErr_NoMemory();
    }
    return run(from, work, [&] { selected->attention(args); });
}

StateRows state_rows(Arguments& from) {
    StateRows rows;
    for (const std::int32_t** array : {&rows.starts, &rows.sources, &rows.targets, &rows.positions, &rows.sequences, &rows.drafts})
        *array = static_cast<const std::int32_t*>(from.address());
    rows.count = from.integer();
    return rows;
}

PyObject* delta(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 26);
    DeltaArgs args;
    args.mixed = from.address();
    args.gates = from.address();
    for (const float** weight : {&args.convolution, &args.decay, &args.dt_bias, &args.norm})
        *weight = static_cast<const float*>(from.address());
    args.states = static_cast<float*>(from.address());
    args.tail = from.address();
    args.drafts = from.address();
    args.output = from.address();
    args.rows = state_rows(from);
    long tokens = from.integer();
    for (long* size : {&args.key_heads, &args.value_heads, &args.key_size, &args.value_size, &args.kernel})
        *size = from.integer();
    args.eps = from.number();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    if (from.ok()) {
        args.scratch = scratch(selected->delta_scratch(args));
        if (!args.scratch) return PyErr_NoMemory();
    }
    return run(from, tokens * args.value_heads * args.key_size * args.value_size, [&] { selected->delta(args); });
}

PyObject* convolution(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 17);
    ConvolutionArgs args;
    args.mixed = from.address();
    args.weight = static_cast<const float*>(from.address());
    args.tail = from.address();
    args.drafts = from.address();
    args.output = from.address();
    args.rows = state_rows(from);
    long tokens = from.integer();
    args.channels = from.integer();
    args.kernel = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    return run(from, tokens * args.channels * args.kernel, [&] { selected->convolution(args); });
}

PyObject* experts(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 8);
    ExpertsArgs args;
    args.layer = static_cast<const ExpertsLayer*>(from.address());
    args.x = from.address();
    args.residual = from.address();
    args.y = from.address();
    args.rows = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.float_output = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    if (!from.ok()) return nullptr;
    args.scratch = scratch(selected->experts_scratch(args));
    if (!args.scratch) return PyErr_NoMemory();
    return run(from, experts_work(args), [&] { selected->experts(args); });
}

PyObject* program(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 29);
    ProgramArgs args;
    args.operations = static_cast<const Operation*>(from.address());
    args.widths = static_cast<const long*>(from.address());
    args.input = from.address();
    args.output = from.address();
    args.ropes = static_cast<const void* const*>(from.address());
    args.query_starts = static_cast<const std::int32_t*>(from.address());
    args.context_lens = static_cast<const std::int32_t*>(from.address());
    args.block_tables = static_cast<const std::int32_t*>(from.address());
    args.slots = static_cast<const std::int64_t*>(from.address());
    args.ahead = static_cast<const std::int32_t*>(from.address());
    args.causal_lens = static_cast<const std::int32_t*>(from.address());
    args.states = state_rows(from);
    args.row_slots = static_cast<const std::int32_t*>(from.address());
    args.scalings = static_cast<const float*>(from.address());
    args.scaling_stride = from.integer();
    for (long* size :
         {&args.count, &args.buffers, &args.sequences, &args.tokens, &args.table_stride, &args.column_stride})
        *size = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    long work = 0;
    if (from.ok()) {
        args.scratch = scratch(selected->program_scratch(args, &work));
        if (!args.scratch) return PyErr_NoMemory();
    }
    return run(from, work, [&] { selected->program(args); });
}

// A field of `Operation`, to compare with Python's record.
struct RecordField {
    const char* name;
    std::size_t offset, size;
    bool is_float;
};

#define FIELD(name) \
    {#name, offsetof(Operation, name), sizeof(Operation::name), std::is_floating_point_v<decltype(Operation::name)>}

constexpr RecordField OPERATION_FIELDS[] = {
    FIELD(kind), FIELD(source), FIELD(target), FIELD(residual), FIELD(weight), FIELD(bias), FIELD(in_features),
    FIELD(out_features), FIELD(first), FIELD(groups), FIELD(weight_stride), FIELD(centered), FIELD(activation), FIELD(gated),
    FIELD(weight_bits), FIELD(group), FIELD(minimums), FIELD(input_bits), FIELD(eps), FIELD(keys), FIELD(values), FIELD(scales),
    FIELD(heads), FIELD(kv_heads), FIELD(head_size), FIELD(block_size), FIELD(rope_size), FIELD(window), FIELD(scale),
    FIELD(soft_cap), FIELD(rope), FIELD(column), FIELD(is_sharing), FIELD(is_causal), FIELD(plan), FIELD(adapters),
    FIELD(convolution), FIELD(decay), FIELD(dt_bias), FIELD(states), FIELD(tail), FIELD(drafts), FIELD(value_size),
    FIELD(kernel), FIELD(experts),
};
constexpr int OPERATION_LENGTH = sizeof(OPERATION_FIELDS) / sizeof(RecordField);
static_assert(sizeof(Operation) == 8 * OPERATION_LENGTH, "OPERATION_FIELDS must name every field of Operation");

PyObject* operation_fields(PyObject*, PyObject*) {
    PyObject* fields = PyTuple_New(OPERATION_LENGTH);
    for (int i = 0; fields && i < OPERATION_LENGTH; ++i) {
        const RecordField& field = OPERATION_FIELDS[i];
        PyObject* described = Py_BuildValue("(snnO)", field.name, static_cast<Py_ssize_t>(field.offset),
                                            static_cast<Py_ssize_t>(field.size), field.is_float ? Py_True : Py_False);
        if (!described) Py_CLEAR(fields);
        else PyTuple_SetItem(fields, i, described);
    }
    return fields;
}

PyObject* sampling(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 10);
    SamplingArgs args;
    args.logits = static_cast<const float*>(from.address());
    args.temperatures = static_cast<const float*>(from.address());
    args.top_ps = static_cast<const float*>(from.address());
    args.min_ps = static_cast<const float*>(from.address());
    args.top_ks = static_cast<const long*>(from.address());
    args.numbers = static_cast<const double*>(from.address());
    args.tokens = static_cast<std::int64_t*>(from.address());
    args.rows = from.integer();
    args.vocabulary = from.integer();
    args.threads = static_cast<int>(from.integer());
    if (from.ok()) {
        args.scratch = scratch(selected->sampling_scratch(args));
        if (!args.scratch) return PyErr_NoMemory();
    }
    return run(from, args.rows * args.vocabulary * 16, [&] { selected->sampling(args); });
}

PyObject* encoder_attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 11);
    EncoderAttentionArgs args;
    args.qkv = from.address();
    args.y = from.address();
    args.scratch = nullptr;
    args.images = from.integer();
    args.length = from.integer();
    args.heads = from.integer();
    args.head_size = from.integer();
    args.first = from.integer();
    args.last = from.integer();
    args.scale = from.number();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    if (from.ok()) {
        args.scratch = scratch(selected->encoder_attention_scratch(args));
        if (!args.scratch) return PyErr_NoMemory();
    }
    long work = args.images * args.heads * (args.last - args.first) * args.length * args.head_size / 8;
    return run(from, work, [&] { selected->encoder_attention(args); });
}

PyObject* rotation(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments from(values, count, 9);
    RotationArgs args;
    args.qkv = from.address();
    args.cos = static_cast<const float*>(from.address());
    args.sin = static_cast<const float*>(from.address());
    for (long* size : {&args.rows, &args.heads, &args.head_size, &args.stride}) *size = from.integer();
    args.dtype = static_cast<int>(from.integer());
    args.threads = static_cast<int>(from.integer());
    return run(from, args.rows * args.heads * args.head_size, [&] { selected->rotation(args); });
}

#define FAST(name, doc) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, doc}

PyMethodDef methods[] = {
    {"supported_isas", supported_isas, METH_NOARGS, "Instruction sets of this build that this processor runs, the best first."},
    {"runnable_isas", runnable_isas, METH_NOARGS, "The same, whether this build has them or not."},
    {"selected_isa", selected_isa, METH_NOARGS, "The instruction set whose kernels are used."},
    {"select_isa", select_isa, METH_O, "Use the kernels of an instruction set."},
    {"has_superblocks", has_superblocks, METH_NOARGS, "Whether the kernels multiply superblock weights."},
    {"operation_fields", operation_fields, METH_NOARGS, "Name, offset, size and whether it is a float, of each field."},
    FAST(pack, "weight, packed, out, in, dtype, gated, threads"),
    FAST(pack_quantized, "weight, scales, minimums, packed, out, in, bits, group, gated, threads"),
    FAST(pack_blocks, "blocks, ups, packed, out, in, kind, first_tile, offset, gated, threads"),
    FAST(gather, "packed, ids, y, count, in, dtype, bits, group, minimums, threads"),
    FAST(linear, "The fields of LinearArgs in order, without scratch and shrunk."),
    FAST(norm, "The fields of NormArgs in order."),
    FAST(gate, "The fields of GateArgs in order."),
    FAST(attention, "The fields of AttentionArgs in order, without scratch."),
    FAST(delta, "The fields of DeltaArgs in order, without scratch, and tokens after rows."),
    FAST(convolution, "The fields of ConvolutionArgs in order, and tokens after rows."),
    FAST(experts, "The fields of ExpertsArgs in order, without scratch and next."),
    FAST(program, "The fields of ProgramArgs in order, without scratch."),
    FAST(sampling, "The fields of SamplingArgs in order, without scratch."),
    FAST(encoder_attention, "The fields of EncoderAttentionArgs in order, without scratch."),
    FAST(rotation, "The fields of RotationArgs in order."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Kernels for a CPU.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    const Kernels* found[MOST_ISAS];
    if (!supported(found)) {
        PyErr_SetString(PyExc_ImportError, "this build has no kernels for this processor");
        return nullptr;
    }
    selected = found[0];
    PyObject* module = PyModule_Create(&definition);
    const struct { const char* name; long value; } constants[] = {
        {"interface", INTERFACE}, {"max_buffers", MAX_BUFFERS}, {"max_plans", MAX_PLANS},
        {"NORM", NORM}, {"LINEAR", LINEAR}, {"ATTENTION", ATTENTION}, {"DELTA", DELTA}, {"CONVOLUTION", CONVOLUTION},
        {"GATE", GATE}, {"MULTIPLY", MULTIPLY}, {"EXPERTS", EXPERTS}, {"max_kernel", MAX_KERNEL},
    };
    for (const auto& constant : constants)
        if (module && PyModule_AddIntConstant(module, constant.name, constant.value)) Py_CLEAR(module);
    return module;
}
