// An attention call, plain or with windows, straight from torch's tensors. Reading and checking them one by one in Python touches thousands of
// cache lines, which a step of a model has pushed out since the last call. Tensors are read by the table of functions that
// torch publishes for DLPack (https://dmlc.github.io/dlpack/latest/c_api.html): nothing here is compiled against torch.
#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>

#include "abi.h"

extern "C" int nibblekv_attention(const void* args);

namespace nibblekv {
namespace {

// Of dlpack.h, version 1.
enum : int32_t { kHost = 1 };
enum : uint8_t { kInteger = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4 };

struct Tensor {
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;  // in elements
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major, minor;
  void *previous, *allocate, *managed_from, *managed_to;
  int (*borrow)(void* object, Tensor* out);
  void* stream;
};

PyTypeObject* tensor_type = nullptr;
const Exchange* exchange = nullptr;

// Reads a tensor of the host; not one of another class, which may keep its data elsewhere.
bool read(PyObject* object, int dims, Tensor* out) {
  if (Py_TYPE(object) != tensor_type) return false;
  if (exchange->borrow(object, out)) {
    PyErr_Clear();
    return false;
  }
  out->data = static_cast<char*>(out->data) + out->byte_offset;
  return out->device_type == kHost && out->dims == dims && out->lanes == 1 && out->shape && out->strides;
}

bool is_index(const Tensor& t) { return t.code == kInteger && (t.bits == 32 || t.bits == 64); }

int64_t float_type(const Tensor& t) {
  if (t.code == kFloat && t.bits == 32) return kFloat32;
  if (t.code == kFloat && t.bits == 16) return kFloat16;
  return t.code == kBfloat && t.bits == 16 ? int64_t{kBFloat16} : -1;
}

// The longest query where the sequences' lengths and first queries agree with each other, the queries and the block table,
// else -1.
int64_t longest_query(const AttentionArgs& a, int64_t num_tokens, int64_t capacity) {
  int64_t begin = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, 0), longest = 0;
  if (begin != 0) return -1;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t end = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, seq + 1);
    const int64_t seq_len = load_index(a.seq_lens, a.seq_lens_stride, a.seq_lens_are_64, seq);
    if (end < begin || seq_len < end - begin || seq_len > capacity) return -1;
    if (end - begin > longest) longest = end - begin;
    begin = end;
  }
  return begin == num_tokens ? longest : -1;
}

const uint8_t* bytes(const Tensor& t) { return static_cast<const uint8_t*>(t.data); }

// Adds unquantized rows, or None, to a record; false where they are not as `nibblekv.AttentionOptions` says.
bool add_raw(PyObject* const* objects, int64_t longest, AttentionArgs* a) {
  if (objects[0] == Py_None && objects[1] == Py_None) return a->raw_window == 0 && a->raw_sinks == 0;
  Tensor key, value;
  if (!read(objects[0], 4, &key) || !read(objects[1], 4, &value)) return false;
  if (a->raw_window < 0 || a->raw_sinks < 0 || (a->raw_window == 0 && a->raw_sinks == 0)) return false;
  const Geometry& g = *a->geometry;
  const int64_t dtype = float_type(key), element = key.bits / 8, rows = key.shape[1];
  if (dtype < 0 || float_type(value) != dtype || value.shape[1] != rows) return false;
  const Tensor* both[] = {&key, &value};
  for (const Tensor* raw : both)
    if (raw->shape[0] != a->num_seqs || raw->shape[2] != g.num_kv_heads || raw->strides[3] != 1) return false;
  if (key.shape[3] != g.k.head_size || value.shape[3] != g.v.head_size) return false;
  a->raw_ring = rows - a->raw_sinks;
  if (a->raw_ring < (a->raw_window > 0 ? a->raw_window + longest - 1 : 0)) return false;
  a->raw_key = bytes(key);
  a->raw_value = bytes(value);
  a->raw_key_seq_stride = key.strides[0] * element;
  a->raw_key_row_stride = key.strides[1] * element;
  a->raw_key_head_stride = key.strides[2] * element;
  a->raw_value_seq_stride = value.strides[0] * element;
  a->raw_value_row_stride = value.strides[1] * element;
  a->raw_value_head_stride = value.strides[2] * element;
  a->raw_dtype = dtype;
  return true;
}

// Fills a record, but for its numbers; false where an argument is not as `nibblekv.paged_attention` says, or needs the long
// way to be seen to be.
bool fill(const CacheShape& known, PyObject* const* objects, PyObject* const* raw, AttentionArgs* a) {
  Tensor query, cache, table, lengths, starts, out;
  if (!read(objects[0], 3, &query) || !read(objects[1], static_cast<int>(known.dims), &cache) ||
      !read(objects[2], 2, &table) || !read(objects[3], 1, &lengths) || !read(objects[4], 1, &starts) ||
      !read(objects[5], 3, &out))
    return false;
  if (cache.code != kUnsigned || cache.bits != 8 || reinterpret_cast<uintptr_t>(cache.data) % 4) return false;
  for (int64_t i = 0; i < known.dims; ++i)
    if ((i > 0 && cache.shape[i] != known.shape[i]) || cache.strides[i] != known.strides[i]) return false;
  const Geometry& g = *known.geometry;
  const int64_t dtype = float_type(query), num_tokens = query.shape[0], heads = query.shape[1], num_seqs = lengths.shape[0];
  if (dtype < 0 || float_type(out) != dtype || !is_index(table) || !is_index(lengths) || !is_index(starts)) return false;
  if (num_tokens == 0 || heads == 0 || heads % g.num_kv_heads || query.shape[2] != g.k.head_size || query.strides[2] != 1)
    return false;
  if (out.shape[0] != num_tokens || out.shape[1] != heads || out.shape[2] != g.v.head_size || out.strides[2] != 1)
    return false;
  if (table.shape[0] != num_seqs || starts.shape[0] != num_seqs + 1) return false;
  if (!(std::isfinite(a->softmax_scale) && a->softmax_scale > 0) || a->sliding_window < 0) return false;
  const int64_t element = query.bits / 8;
  a->geometry = &g;
  a->kv_cache = bytes(cache);
  a->query = bytes(query);
  a->query_token_stride = query.strides[0] * element;
  a->query_head_stride = query.strides[1] * element;
  a->query_dtype = a->out_dtype = dtype;
  a->out = static_cast<uint8_t*>(out.data);
  a->out_token_stride = out.strides[0] * element;
  a->out_head_stride = out.strides[1] * element;
  a->block_table = bytes(table);
  a->block_table_row = table.strides[0] * (table.bits / 8);
  a->block_table_col = table.strides[1] * (table.bits / 8);
  a->block_table_is_64 = table.bits == 64;
  a->seq_lens = bytes(lengths);
  a->seq_lens_stride = lengths.strides[0] * (lengths.bits / 8);
  a->seq_lens_are_64 = lengths.bits == 64;
  a->query_start_loc = bytes(starts);
  a->query_start_stride = starts.strides[0] * (starts.bits / 8);
  a->query_start_is_64 = starts.bits == 64;
  a->num_seqs = num_seqs;
  a->num_query_heads = heads;
  a->num_blocks = cache.shape[0];
  a->causal = 1;
  a->chunk_lookback = -1;
  const int64_t longest = longest_query(*a, num_tokens, table.shape[1] * g.block_size);
  return longest >= 0 && add_raw(raw, longest, a);
}

// attend(shape, query, kv_cache, block_table, seq_lens, query_start_loc, out, raw_key, raw_value, softmax_scale,
//        sliding_window, raw_window, raw_sinks, num_threads) -> bool
PyObject* attend(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  if (count != 14 || !exchange || !PyFloat_CheckExact(objects[9])) Py_RETURN_FALSE;
  const void* known = PyLong_AsVoidPtr(objects[0]);
  AttentionArgs args{};
  args.softmax_scale = PyFloat_AS_DOUBLE(objects[9]);
  args.sliding_window = PyLong_AsLongLong(objects[10]);
  args.raw_window = PyLong_AsLongLong(objects[11]);
  args.raw_sinks = PyLong_AsLongLong(objects[12]);
  args.num_threads = PyLong_AsLongLong(objects[13]);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (!fill(*static_cast<const CacheShape*>(known), objects + 1, objects + 7, &args)) Py_RETURN_FALSE;
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = nibblekv_attention(&args);
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(status == 0);
}

// bind(type) -> bool: reads tensors of this class from now on; false where it publishes no such table.
PyObject* bind(PyObject*, PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  const Exchange* table =
      capsule ? static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api")) : nullptr;
  Py_XDECREF(capsule);  // the class keeps it
  PyErr_Clear();
  if (!table || table->major != 1 || !table->borrow || !PyType_Check(type)) Py_RETURN_FALSE;
  Py_INCREF(type);
  tensor_type = reinterpret_cast<PyTypeObject*>(type);
  exchange = table;
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL, nullptr},
    {"bind", bind, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace nibblekv

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&nibblekv::definition); }
#endif
