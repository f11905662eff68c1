// Each function here does what the one of its name in bulk.py does, in one call for a whole list.

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

[[noreturn]] void raise() {
  throw python_error();  // HANDLE_TH_ERRORS gives it back to Python
}

PyObject* checked(PyObject* object) {
  if (object == nullptr) raise();
  return object;
}

PyObject* referenced(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// What is in a list or tuple: tensors, where they are asked for.
class Sequence {
 public:
  explicit Sequence(PyObject* sequence)
      : items_(checked(PySequence_Fast(sequence, "expected a list or a tuple"))) {}

  Py_ssize_t size() const {
    return PySequence_Fast_GET_SIZE(items_.get());
  }

  PyObject* item(Py_ssize_t i) const {
    return PySequence_Fast_GET_ITEM(items_.get(), i);
  }

  const at::Tensor& tensor(Py_ssize_t i) const {
    if (!THPVariable_Check(item(i))) {
      PyErr_Format(PyExc_TypeError, "item %zd is a %s and no tensor", i, Py_TYPE(item(i))->tp_name);
      raise();
    }
    return THPVariable_Unpack(item(i));
  }

  // The gradient as Python has it: a class of its own may have another.
  PyObject* grad(Py_ssize_t i) const {
    if (is_plain(i)) return checked(THPVariable_Wrap(tensor(i).grad()));
    return checked(PyObject_GetAttrString(held(i).get(), "grad"));
  }

  bool is_plain(Py_ssize_t i) const {
    return THPVariable_CheckExact(item(i));
  }

  // An item for as long as code runs that may take it out of the list.
  THPObjectPtr held(Py_ssize_t i) const {
    return THPObjectPtr(referenced(item(i)));
  }

 private:
  THPObjectPtr items_;
};

// What was in a list, for where it must not become longer or shorter on the way.
class Copied : public Sequence {
 public:
  explicit Copied(PyObject* sequence)
      : Sequence(THPObjectPtr(checked(PySequence_Tuple(sequence))).get()) {}
};

// A list or tuple with what a function returns for each tensor.
template <typename F>
PyObject* list_of(const Sequence& tensors, F&& f) {
  THPObjectPtr result(checked(PyList_New(tensors.size())));
  for (Py_ssize_t i = 0; i < tensors.size(); i++) PyList_SET_ITEM(result.get(), i, f(i));
  return result.release();
}

template <typename F>
PyObject* tuple_of(const Sequence& tensors, F&& f) {
  THPObjectPtr result(checked(PyTuple_New(tensors.size())));
  for (Py_ssize_t i = 0; i < tensors.size(); i++) PyTuple_SET_ITEM(result.get(), i, f(i));
  return result.release();
}

// Neighbours are mostly alike, and then there is nothing to add.
template <typename F>
PyObject* set_of(const Sequence& objects, F&& f) {
  THPObjectPtr result(checked(PySet_New(nullptr)));
  PyObject* last = nullptr;
  for (Py_ssize_t i = 0; i < objects.size(); i++) {
    PyObject* const value = f(i);
    if (value != last && PySet_Add(result.get(), value) < 0) raise();
    last = value;
  }
  return result.release();
}

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  const auto size = static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t));
  return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), size));
}

int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.data_ptr());
}

int64_t size_of(const at::Tensor& tensor) {
  return tensor.numel();
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor._version();
}

int64_t requires_grad(const at::Tensor& tensor) {
  return tensor.requires_grad();
}

// A number of each tensor.
template <int64_t (*number)(const at::Tensor&)>
PyObject* numbers(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  std::vector<int64_t> result(tensors.size());
  for (Py_ssize_t i = 0; i < tensors.size(); i++) result[i] = number(tensors.tensor(i));
  return bytes_of(result);
  END_HANDLE_TH_ERRORS
}

PyObject* are_same(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *first, *second;
  if (!PyArg_ParseTuple(args, "OO", &first, &second)) raise();
  const Sequence some(first), others(second);
  bool same = some.size() == others.size();
  for (Py_ssize_t i = 0; same && i < some.size(); i++) same = some.item(i) == others.item(i);
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

PyObject* types(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence objects(sequence);
  return set_of(objects, [&](Py_ssize_t i) {
    return reinterpret_cast<PyObject*>(Py_TYPE(objects.item(i)));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* dtypes(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  return tuple_of(tensors, [&](Py_ssize_t i) {
    const at::ScalarType dtype = tensors.tensor(i).scalar_type();
    return referenced(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* layouts(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  return set_of(tensors, [&](Py_ssize_t i) {
    return reinterpret_cast<PyObject*>(torch::getTHPLayout(tensors.tensor(i).layout()));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* orders(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  bool contiguous = true;
  for (Py_ssize_t i = 0; contiguous && i < tensors.size(); i++) {
    contiguous = tensors.tensor(i).is_contiguous();
  }
  if (contiguous) Py_RETURN_NONE;
  std::vector<int64_t> numbers;
  for (Py_ssize_t i = 0; i < tensors.size(); i++) {
    const at::Tensor& tensor = tensors.tensor(i);
    numbers.push_back(tensor.dim());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return bytes_of(numbers);
  END_HANDLE_TH_ERRORS
}

PyObject* grads(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Copied tensors(sequence);
  return list_of(tensors, [&](Py_ssize_t i) { return tensors.grad(i); });
  END_HANDLE_TH_ERRORS
}

PyObject* have_grads(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  for (Py_ssize_t i = 0; i < tensors.size(); i++) {
    if (tensors.is_plain(i)) {
      if (tensors.tensor(i).grad().defined()) Py_RETURN_TRUE;
    } else if (THPObjectPtr(tensors.grad(i)).get() != Py_None) {
      Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

PyObject* clear_grads(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  for (Py_ssize_t i = 0; i < tensors.size(); i++) {
    if (tensors.is_plain(i)) {
      tensors.tensor(i).mutable_grad().reset();
    } else if (PyObject_SetAttrString(tensors.held(i).get(), "grad", Py_None) < 0) {
      raise();
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* entries(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *sequence, *name;
  if (!PyArg_ParseTuple(args, "OO", &sequence, &name)) raise();
  const Copied mappings(sequence);
  return list_of(mappings, [&](Py_ssize_t i) {
    return checked(PyObject_GetItem(mappings.item(i), name));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* written(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Sequence tensors(sequence);
  for (Py_ssize_t i = 0; i < tensors.size(); i++) {
    if (!tensors.tensor(i).is_inference()) torch::autograd::impl::bump_version(tensors.tensor(i));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"are_same", are_same, METH_VARARGS, nullptr},
    {"types", types, METH_O, nullptr},
    {"dtypes", dtypes, METH_O, nullptr},
    {"layouts", layouts, METH_O, nullptr},
    {"addresses", numbers<address_of>, METH_O, nullptr},
    {"sizes", numbers<size_of>, METH_O, nullptr},
    {"versions", numbers<version_of>, METH_O, nullptr},
    {"require_grad", numbers<requires_grad>, METH_O, nullptr},
    {"orders", orders, METH_O, nullptr},
    {"grads", grads, METH_O, nullptr},
    {"have_grads", have_grads, METH_O, nullptr},
    {"clear_grads", clear_grads, METH_O, nullptr},
    {"entries", entries, METH_VARARGS, nullptr},
    {"written", written, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "bulk", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_bulk() {
  return PyModule_Create(&definition);
}
