/* Functions of lists, most of them of tensors, for host_lists.py, which has the same in Python.

   No header of torch's Python binding: where a tensor's pointer lies in its Python object is found at load. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <ATen/core/TensorBase.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

static Py_ssize_t place = -1;
static PyTypeObject *tensor_type = nullptr, *usual_types[2] = {};  // the last two: Tensor, Parameter
static PyObject *shard_name = nullptr, *array_type = nullptr;
static PyObject *dtypes[static_cast<int>(c10::ScalarType::NumOptions)];  // of Python, as far as known

static c10::TensorImpl *impl_of(PyObject *x)
{
    return *reinterpret_cast<c10::TensorImpl **>(reinterpret_cast<char *>(x) + place);
}

static at::TensorBase tensor_of(PyObject *x)
{
    return at::TensorBase(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl_of(x)));
}

/* Whether an object is a list of `size` tensors, or of any size if that is -1; else sets an error. */
static bool are_tensors(PyObject *list, Py_ssize_t size, bool may_be_none = false)
{
    if (place < 0 || !PyList_Check(list) || (size >= 0 && PyList_GET_SIZE(list) != size)) {
        PyErr_SetString(PyExc_TypeError, "this is no list of so many tensors");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *x = PyList_GET_ITEM(list, i);
        if (!PyObject_TypeCheck(x, tensor_type) && !(may_be_none && x == Py_None)) {
            PyErr_SetString(PyExc_TypeError, "this is no tensor");
            return false;
        }
    }
    return true;
}

/* Whether there are two arguments; else sets an error. */
static bool are_two(Py_ssize_t count)
{
    if (count != 2) PyErr_SetString(PyExc_TypeError, "this takes two arguments");
    return count == 2;
}

static bool is_float(c10::ScalarType dtype)
{
    return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kHalf || dtype == c10::kBFloat16;
}

/* Calls a function, and turns an exception of torch into one of Python. */
template <class F> static PyObject *guarded(F function)
{
    try {
        return function();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

/* Arguments: the class of tensors, and some of them. Whether their pointers are found in their objects. */
static PyObject *prepare(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyType_Check(arguments[0]) || !PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "prepare(type, tensors)");
        return nullptr;
    }
    PyObject *list = arguments[1];
    tensor_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(arguments[0]));
    const Py_ssize_t first = sizeof(PyObject), last = tensor_type->tp_basicsize - (Py_ssize_t)sizeof(void *);
    place = -1;
    for (Py_ssize_t at = first; at <= last && place < 0; at += sizeof(void *)) {
        bool is_here = PyList_GET_SIZE(list) > 0;
        for (Py_ssize_t i = 0; is_here && i < PyList_GET_SIZE(list); i++) {
            PyObject *x = PyList_GET_ITEM(list, i), *known = PyObject_GetAttrString(x, "_cdata");
            if (!known) return nullptr;
            is_here = PyLong_AsVoidPtr(known) == *reinterpret_cast<void **>(reinterpret_cast<char *>(x) + at);
            Py_DECREF(known);
        }
        if (is_here) place = at;
    }
    for (Py_ssize_t i = 0; place >= 0 && i < 2; i++) usual_types[i] = Py_TYPE(PyList_GET_ITEM(list, i));
    if (!shard_name && !(shard_name = PyUnicode_InternFromString("_local_tensor"))) return nullptr;
    PyObject *arrays = array_type ? nullptr : PyImport_ImportModule("array");
    if (arrays) array_type = PyObject_GetAttrString(arrays, "array");
    Py_XDECREF(arrays);
    return array_type ? PyBool_FromLong(place >= 0) : nullptr;
}

static int64_t address_of(PyObject *x)
{
    return reinterpret_cast<int64_t>(impl_of(x)->mutable_data());
}

/* An array of the address of each tensor's elements. */
static PyObject *addresses(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, n * (Py_ssize_t)sizeof(int64_t));
    PyObject *result = bytes ? guarded([&] {
        for (Py_ssize_t i = 0; i < n; i++) {
            const int64_t address = address_of(PyList_GET_ITEM(list, i));
            std::memcpy(PyBytes_AS_STRING(bytes) + i * (Py_ssize_t)sizeof address, &address, sizeof address);
        }
        return PyObject_CallFunction(array_type, "sO", "q", bytes);
    }) : nullptr;
    Py_XDECREF(bytes);
    return result;
}

/* Arguments: tensors, and an array or a list of numbers. Whether each tensor's elements are at that address. */
static PyObject *are_at(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    Py_buffer known{};
    const bool is_array = PyObject_TypeCheck(arguments[1], reinterpret_cast<PyTypeObject *>(array_type));
    if (is_array && PyObject_GetBuffer(arguments[1], &known, PyBUF_SIMPLE)) return nullptr;
    if (!is_array && !PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "this is no list of addresses");
        return nullptr;
    }
    PyObject *result = guarded([&] {
        bool all = is_array ? known.len == n * (Py_ssize_t)sizeof(int64_t) : PyList_GET_SIZE(arguments[1]) == n;
        for (Py_ssize_t i = 0; all && i < n; i++) {
            const int64_t address = address_of(PyList_GET_ITEM(arguments[0], i));
            all = is_array ? address == static_cast<const int64_t *>(known.buf)[i]
                           : address == PyLong_AsLongLong(PyList_GET_ITEM(arguments[1], i));
        }
        return PyErr_Occurred() ? nullptr : PyBool_FromLong(all);
    });
    PyBuffer_Release(&known);
    return result;
}

/* Whether each tensor that has elements has memory for them. */
static PyObject *have_memory(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++)
            all = address_of(PyList_GET_ITEM(list, i)) || !impl_of(PyList_GET_ITEM(list, i))->numel();
        return PyBool_FromLong(all);
    });
}

/* Whether no tensor is a view of another one. */
static PyObject *are_whole(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++)
            all = !tensor_of(PyList_GET_ITEM(list, i)).is_view();
        return PyBool_FromLong(all);
    });
}

/* A list of what a function makes of each object, or null if it makes none, with its error. */
template <class F> static PyObject *list_of(PyObject *list, F make)
{
    const Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *result = PyList_New(n);
    PyObject *filled = result ? guarded([&]() -> PyObject * {
        for (Py_ssize_t i = 0; i < n; i++) {
            if (i >= PyList_GET_SIZE(list)) {  // code of Python that `make` has run may have changed it
                PyErr_SetString(PyExc_RuntimeError, "the list has changed meanwhile");
                return nullptr;
            }
            PyObject *x = Py_NewRef(PyList_GET_ITEM(list, i)), *made = make(x);
            Py_DECREF(x);
            if (!made) return nullptr;
            PyList_SET_ITEM(result, i, made);
        }
        return result;
    }) : nullptr;
    if (!filled) Py_XDECREF(result);
    return filled;
}

/* A list of the version of each tensor. */
static PyObject *versions(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return list_of(list, [](PyObject *x) { return PyLong_FromLong(impl_of(x)->version_counter().current_version()); });
}

/* Whether the gradient of a tensor is that object, a tensor or None. */
static bool has_grad(PyObject *x, PyObject *grad)
{
    const auto &own = reinterpret_cast<const at::TensorBase &>(impl_of(x)->grad());
    if (grad == Py_None) return !own.defined();
    return own.defined() && PyObject_TypeCheck(grad, tensor_type) && own.unsafeGetTensorImpl() == impl_of(grad);
}

/* Arguments: tensors and gradients, or None. Whether the `.grad` of each is that one. */
static PyObject *have_grads(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    if (!are_tensors(arguments[1], n, true)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < n; i++) {
            all = has_grad(PyList_GET_ITEM(arguments[0], i), PyList_GET_ITEM(arguments[1], i));
        }
        return PyBool_FromLong(all);
    });
}

/* A list of whether each tensor has a gradient. */
static PyObject *with_grad(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return list_of(list, [](PyObject *x) {
        return PyBool_FromLong(reinterpret_cast<const at::TensorBase &>(impl_of(x)->grad()).defined());
    });
}

/* Arguments: tensors and gradients, or None. Sets the `.grad` of each; returns whether it has. It sets
   none if one is not in the shape, on the device and in the dtype of its tensor, or FP32. The earlier
   gradients go last: their end may run code of Python. */
static PyObject *set_grads(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    if (!are_tensors(arguments[1], n, true)) return nullptr;
    std::vector<at::TensorBase> grads(n);
    return guarded([&] {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *grad = PyList_GET_ITEM(arguments[1], i);
            if (grad == Py_None) continue;
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(arguments[0], i)), *own = impl_of(grad);
            const bool fits = impl != own && impl->layout() == c10::kStrided && own->layout() == c10::kStrided
                && impl->device() == own->device() && impl->sizes() == own->sizes()
                && (own->dtype() == impl->dtype() || own->dtype().toScalarType() == c10::kFloat);
            if (!fits) return PyBool_FromLong(false);
            grads[i] = tensor_of(grad);
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(arguments[0], i));
            if (grads[i].defined() || reinterpret_cast<const at::TensorBase &>(impl->grad()).defined())
                std::swap(grads[i], reinterpret_cast<at::TensorBase &>(impl->mutable_grad()));
        }
        return PyBool_FromLong(true);
    });
}

/* Whether a tensor takes a gradient of any dtype; unknown before torch 2.10. */
template <class T> static auto takes_any_grad(const T &x, int) -> decltype(!x.grad_dtype()) { return !x.grad_dtype(); }
template <class T> static bool takes_any_grad(const T &, long) { return false; }

/* Whether each tensor takes a gradient of any dtype. */
static PyObject *take_any_grad(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++)
            all = takes_any_grad(tensor_of(PyList_GET_ITEM(list, i)), 0);
        return PyBool_FromLong(all);
    });
}

/* Sets the `.grad` of each tensor to None. The gradients go last: their end may run code of Python. */
static PyObject *clear_grads(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    std::vector<at::TensorBase> grads;
    return guarded([&] {
        grads.reserve(PyList_GET_SIZE(list));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(list, i));
            if (reinterpret_cast<const at::TensorBase &>(impl->grad()).defined())
                grads.push_back(std::move(reinterpret_cast<at::TensorBase &>(impl->mutable_grad())));
        }
        return Py_NewRef(Py_None);
    });
}

/* Arguments: tensors and bools. Whether each requires a gradient, or not, as its bool says. */
static PyObject *train(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    PyObject *flags = arguments[1];
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    if (!PyList_Check(flags) || PyList_GET_SIZE(flags) != n) {
        PyErr_SetString(PyExc_TypeError, "this is no list of so many flags");
        return nullptr;
    }
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < n; i++)
            all = impl_of(PyList_GET_ITEM(arguments[0], i))->requires_grad() == (PyList_GET_ITEM(flags, i) == Py_True);
        return PyBool_FromLong(all);
    });
}

/* Arguments: tensors, and others. Whether each is on the device of the other one. */
static PyObject *are_together(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    if (!are_tensors(arguments[1], n)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < n; i++)
            all = impl_of(PyList_GET_ITEM(arguments[0], i))->device() == impl_of(PyList_GET_ITEM(arguments[1], i))->device();
        return PyBool_FromLong(all);
    });
}

static bool is_usual(PyObject *x)
{
    return Py_IS_TYPE(x, usual_types[0]) || Py_IS_TYPE(x, usual_types[1]);
}

/* The dtype of a tensor as Python has it, a new reference, or null and an error. */
static PyObject *dtype_of(PyObject *x)
{
    PyObject *&known = dtypes[static_cast<int>(impl_of(x)->dtype().toScalarType())];
    if (known) return Py_NewRef(known);
    PyObject *dtype = PyObject_GetAttrString(x, "dtype");
    if (dtype && is_usual(x)) known = Py_NewRef(dtype);  // another class may say something else
    return dtype;
}

/* Whether the dtype of a tensor is that one; -1, and an error, if it has none. */
static int has_dtype(PyObject *x, PyObject *dtype)
{
    PyObject *own = dtype_of(x);
    if (own && own != dtype && !is_usual(x)) Py_SETREF(own, PyObject_GetAttrString(x, "dtype"));
    Py_XDECREF(own);  // dtypes live for good
    return own ? own == dtype : -1;
}

/* Arguments: tensors and dtypes. Whether each tensor has that one. */
static PyObject *have_dtypes(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(arguments[0]);
    if (!PyList_Check(arguments[1]) || PyList_GET_SIZE(arguments[1]) != n) {
        PyErr_SetString(PyExc_TypeError, "this is no list of so many dtypes");
        return nullptr;
    }
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < n; i++)
            all = has_dtype(PyList_GET_ITEM(arguments[0], i), PyList_GET_ITEM(arguments[1], i)) == 1;
        return PyErr_Occurred() ? nullptr : PyBool_FromLong(all);
    });
}

/* A tuple of the number of elements of each tensor, one of the dtypes, and whether all are contiguous. */
static PyObject *kind(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *sizes = PyTuple_New(n), *of = PyTuple_New(n), *filled = nullptr;
    if (sizes && of) filled = guarded([&]() -> PyObject * {
        bool are_contiguous = true;
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *x = PyList_GET_ITEM(list, i);
            c10::TensorImpl *impl = impl_of(x);
            are_contiguous &= impl->is_contiguous();
            PyObject *size = PyLong_FromLongLong(impl->numel());
            if (!size) return nullptr;
            PyTuple_SET_ITEM(sizes, i, size);
            PyObject *dtype = dtype_of(x);
            if (!dtype) return nullptr;
            PyTuple_SET_ITEM(of, i, dtype);
        }
        return Py_BuildValue("(OOO)", sizes, of, are_contiguous ? Py_True : Py_False);
    });
    Py_XDECREF(sizes);
    Py_XDECREF(of);
    return filled;
}

/* Arguments: tensors, and tuples of their numbers of elements and dtypes. Whether each is contiguous and
   still of that size and dtype. */
static PyObject *are_of_kind(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_Check(arguments[1]) || !PyTuple_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "are_of_kind(tensors, sizes, dtypes)");
        return nullptr;
    }
    if (!are_tensors(arguments[0], PyTuple_GET_SIZE(arguments[1]))) return nullptr;
    return guarded([&] {
        bool all = PyTuple_GET_SIZE(arguments[1]) == PyTuple_GET_SIZE(arguments[2]);
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(arguments[0]); i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(arguments[0], i));
            all = impl->is_contiguous() && impl->numel() == PyLong_AsLongLong(PyTuple_GET_ITEM(arguments[1], i))
                && has_dtype(PyList_GET_ITEM(arguments[0], i), PyTuple_GET_ITEM(arguments[2], i)) == 1;
        }
        return PyErr_Occurred() ? nullptr : PyBool_FromLong(all);
    });
}

/* Whether a backend is asked for by the environment. */
static bool is_backend_set()
{
    const char *backend = std::getenv("AMP_KERNELS");
    return backend && *backend;
}

/* Whether tensors of a class have their values themselves, as `has_own_values` says in Python. */
static bool has_own_values(PyTypeObject *type)
{
    static PyObject *const name = PyUnicode_InternFromString("__torch_dispatch__");
    return type == usual_types[0] || type == usual_types[1] || _PyType_Lookup(type, name) == _PyType_Lookup(usual_types[0], name);
}

/* Whether an object is a list of lists of tensors; else sets an error. */
static bool are_lists(PyObject *lists)
{
    bool all = PyList_Check(lists) && PyList_GET_SIZE(lists);
    if (!all) PyErr_SetString(PyExc_TypeError, "this is no list of lists");
    for (Py_ssize_t k = 0; all && k < PyList_GET_SIZE(lists); k++) all = are_tensors(PyList_GET_ITEM(lists, k), -1);
    return all;
}

/* Whether lists of one length have tensors of one shape in the i-th places, on the CPU, strided, with their
   values themselves, each list in one dtype, and whether a function holds of each and that of the first list. */
template <class F> static bool all_go_together(PyObject *lists, F holds)
{
    PyObject *first = PyList_GET_ITEM(lists, 0);
    bool all = PyList_GET_SIZE(first) > 0;
    for (Py_ssize_t k = 0; all && k < PyList_GET_SIZE(lists); k++) {
        PyObject *list = PyList_GET_ITEM(lists, k);
        if (PyList_GET_SIZE(list) != PyList_GET_SIZE(first)) return false;
        const auto dtype = impl_of(PyList_GET_ITEM(list, 0))->dtype().toScalarType();
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++) {
            PyObject *x = PyList_GET_ITEM(list, i);
            c10::TensorImpl *impl = impl_of(x), *like = impl_of(PyList_GET_ITEM(first, i));
            all = has_own_values(Py_TYPE(x)) && impl->dtype().toScalarType() == dtype && impl->device().is_cpu()
                && impl->layout() == c10::kStrided && (!k || impl->sizes() == like->sizes()) && holds(impl, like);
        }
    }
    return all;
}

/* Whether lists of tensors go to an operation of the CPU as they are; see host_lists.py. */
static PyObject *go_together(PyObject *, PyObject *lists)
{
    if (!are_lists(lists)) return nullptr;
    return guarded([&] {
        return PyBool_FromLong(!is_backend_set() && all_go_together(lists, [](c10::TensorImpl *x, c10::TensorImpl *) {
            return is_float(x->dtype().toScalarType()) && x->mutable_data();
        }));
    });
}

/* An array of the addresses of tensors, list after list, and of the sizes of the first list; None for
   tensors that do not go together, or do not lie in memory alike and without gaps. */
static PyObject *rows(PyObject *, PyObject *lists)
{
    if (!are_lists(lists)) return nullptr;
    return guarded([&]() -> PyObject * {
        std::vector<int64_t> numbers;
        const bool all = !is_backend_set() && all_go_together(lists, [&](c10::TensorImpl *x, c10::TensorImpl *first) {
            const bool are_alike = (x->is_contiguous() && first->is_contiguous()) || x->strides() == first->strides();
            numbers.push_back(reinterpret_cast<int64_t>(x->mutable_data()));
            return are_alike && x->is_non_overlapping_and_dense() && (numbers.back() || !x->numel())
                && !x->key_set().has(c10::DispatchKey::Negative);
        });
        if (!all) return Py_NewRef(Py_None);
        PyObject *first = PyList_GET_ITEM(lists, 0);
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(first); i++) numbers.push_back(impl_of(PyList_GET_ITEM(first, i))->numel());
        const char *bytes = reinterpret_cast<const char *>(numbers.data());
        return PyObject_CallFunction(array_type, "sy#", "q", bytes, (Py_ssize_t)(numbers.size() * sizeof(int64_t)));
    });
}

/* Whether all tensors are strided, and of float16, bfloat16, float32 or float64. */
static PyObject *are_floats(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return guarded([&] {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(list, i));
            all = impl->layout() == c10::kStrided && is_float(impl->dtype().toScalarType());
        }
        return PyBool_FromLong(all);
    });
}

/* The address of the number of a tensor `[]` of float32 on the CPU; null, and an error, for others. */
static float *number_of(PyObject *x)
{
    c10::TensorImpl *impl = impl_of(x);
    if (impl->device().is_cpu() && impl->numel() == 1 && impl->dtype().toScalarType() == c10::kFloat)
        return static_cast<float *>(impl->mutable_data());
    PyErr_SetString(PyExc_TypeError, "this is no tensor of one float32 on the CPU");
    return nullptr;
}

/* A list of the number that each tensor has. */
static PyObject *numbers(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return list_of(list, [](PyObject *x) {
        const float *number = number_of(x);
        return number ? PyFloat_FromDouble(*number) : nullptr;
    });
}

/* Arguments: tensors of one number, and a number to add to each. */
static PyObject *add(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1)) return nullptr;
    const double more = PyFloat_AsDouble(arguments[1]);
    if (PyErr_Occurred()) return nullptr;
    return guarded([&]() -> PyObject * {
        std::vector<float *> all;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); i++) {
            all.push_back(number_of(PyList_GET_ITEM(arguments[0], i)));
            if (!all.back()) return nullptr;
        }
        for (float *number : all) *number += static_cast<float>(more);
        return Py_NewRef(Py_None);
    });
}

/* Raises the version of each tensor by one, as a write by torch would. */
static PyObject *increment(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    return guarded([&] {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(list, i));
            if (!impl->is_inference()) impl->bump_version();  // those have none
        }
        return Py_NewRef(Py_None);
    });
}

/* A list of the shard of each DTensor, and of other tensors themselves; see host_lists.py. */
static PyObject *shards(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    bool are_usual = true;
    PyObject *found = list_of(list, [&](PyObject *x) {
        PyObject *value = is_usual(x) ? Py_NewRef(x) : PyObject_GetAttr(x, shard_name);
        if (!value && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            value = Py_NewRef(x);
        }
        are_usual &= value && is_usual(value);
        return value;
    });
    if (!found || are_usual) return found;
    Py_DECREF(found);
    return Py_NewRef(Py_None);
}

/* Whether two lists or tuples hold the same objects, or things of which `same` says so, in the same order;
   -1, and an error, for what is none. */
template <class F> static int compare(PyObject *some, PyObject *others, F same)
{
    PyObject *one = PySequence_Fast(some, "this is no sequence");
    PyObject *other = one ? PySequence_Fast(others, "this is no sequence") : nullptr;
    int result = other ? PySequence_Fast_GET_SIZE(one) == PySequence_Fast_GET_SIZE(other) : -1;
    for (Py_ssize_t i = 0; result == 1 && i < PySequence_Fast_GET_SIZE(one); i++) {
        if (i >= PySequence_Fast_GET_SIZE(other)) {  // code of Python that `same` has run has changed it
            result = 0;
            break;
        }
        PyObject *x = Py_NewRef(PySequence_Fast_GET_ITEM(one, i)), *y = Py_NewRef(PySequence_Fast_GET_ITEM(other, i));
        result = same(x, y);
        Py_DECREF(x);
        Py_DECREF(y);
    }
    Py_XDECREF(one);
    Py_XDECREF(other);
    return result;
}

static int hold_same(PyObject *some, PyObject *others)
{
    return compare(some, others, [](PyObject *x, PyObject *y) -> int { return x == y; });
}

/* Arguments: two lists or tuples. Whether they hold the same objects in the same order. */
static PyObject *are_same(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    const int result = are_two(count) ? hold_same(arguments[0], arguments[1]) : -1;
    return result < 0 ? nullptr : PyBool_FromLong(result);
}

/* Arguments: two lists or tuples of lists or tuples. Whether these hold the same objects in the same order. */
static PyObject *are_all_same(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    const int result = are_two(count) ? compare(arguments[0], arguments[1], hold_same) : -1;
    return result < 0 ? nullptr : PyBool_FromLong(result);
}

/* Where a slot of `__slots__` is in the objects of a list, all of one class; null, and an error, for others. */
static const PyMemberDef *slot_of(PyObject *list, PyObject *name)
{
    const bool is_list = PyList_Check(list) && PyList_GET_SIZE(list) > 0;
    PyTypeObject *type = is_list ? Py_TYPE(PyList_GET_ITEM(list, 0)) : nullptr;
    PyObject *slot = type ? PyObject_GetAttr(reinterpret_cast<PyObject *>(type), name) : nullptr;
    if (!slot) PyErr_Clear();
    const PyMemberDef *member = slot && Py_IS_TYPE(slot, &PyMemberDescr_Type) ? reinterpret_cast<PyMemberDescrObject *>(slot)->d_member : nullptr;
    bool is_there = member && member->type == T_OBJECT_EX && PyType_IsSubtype(type, PyDescr_TYPE(slot));
    for (Py_ssize_t i = 0; is_there && i < PyList_GET_SIZE(list); i++)
        is_there = Py_IS_TYPE(PyList_GET_ITEM(list, i), type);
    Py_XDECREF(slot);  // which its class keeps
    if (!is_there) PyErr_SetString(PyExc_TypeError, "these are no objects of one class with this slot");
    return is_there ? member : nullptr;
}

static PyObject **value_in(PyObject *x, const PyMemberDef *member)
{
    return reinterpret_cast<PyObject **>(reinterpret_cast<char *>(x) + member->offset);
}

/* Arguments: pairs; the master of each, its parameter, what holds the values of the master, and the dtype of the
   parameter; and whether both have one gradient. Whether all is as the pairs record it. */
static PyObject *agree(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    static PyObject *const names[] = {
        PyUnicode_InternFromString("grad"), PyUnicode_InternFromString("trains"), PyUnicode_InternFromString("version"),
        PyUnicode_InternFromString("address"), PyUnicode_InternFromString("given"),
    };
    constexpr int slots = std::size(names);
    const Py_ssize_t n = count == 6 && PyList_Check(arguments[0]) ? PyList_GET_SIZE(arguments[0]) : -1;
    if (n < 0 || !PyList_Check(arguments[4]) || PyList_GET_SIZE(arguments[4]) != n) {
        PyErr_SetString(PyExc_TypeError, "agree(pairs, masters, parameters, values, dtypes, at_grads)");
        return nullptr;
    }
    for (int k = 1; k < 4; k++)
        if (!are_tensors(arguments[k], n)) return nullptr;
    const PyMemberDef *members[slots] = {};
    for (int k = 0; n && k < slots; k++)
        if (!(members[k] = slot_of(arguments[0], names[k]))) return nullptr;
    return guarded([&]() -> PyObject * {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *known[slots], *master = PyList_GET_ITEM(arguments[1], i), *parameter = PyList_GET_ITEM(arguments[2], i);
            for (int k = 0; k < slots; k++)
                if (!(known[k] = *value_in(PyList_GET_ITEM(arguments[0], i), members[k]))) return Py_NewRef(Py_False);
            auto [grad, trains, version, address, given] = known;
            PyObject *value = PyList_GET_ITEM(arguments[3], i);
            const bool are_numbers = PyLong_Check(version) && PyLong_Check(address);
            const bool are_same = are_numbers && given == Py_None
                && (arguments[5] != Py_True || (has_grad(master, grad) && has_grad(parameter, grad)))
                && impl_of(master)->requires_grad() == (trains == Py_True)
                && impl_of(parameter)->requires_grad() == (trains == Py_True)
                && PyLong_AsLongLong(version) == impl_of(value)->version_counter().current_version()
                && PyLong_AsLongLong(address) == address_of(value);
            if (PyErr_Occurred()) return nullptr;
            if (!are_same) return Py_NewRef(Py_False);
            const int has = has_dtype(parameter, PyList_GET_ITEM(arguments[4], i));
            if (has != 1) return has ? nullptr : Py_NewRef(Py_False);
        }
        return Py_NewRef(Py_True);
    });
}

/* Arguments: objects of one class, and the name of a slot. A list of what each has there. */
static PyObject *read_slot(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count)) return nullptr;
    if (PyList_Check(arguments[0]) && !PyList_GET_SIZE(arguments[0])) return PyList_New(0);
    const PyMemberDef *member = slot_of(arguments[0], arguments[1]);
    if (!member) return nullptr;
    return list_of(arguments[0], [member](PyObject *x) {
        PyObject *value = *value_in(x, member);
        if (!value) PyErr_SetString(PyExc_AttributeError, member->name);
        return Py_XNewRef(value);
    });
}

/* Arguments: objects of one class, the name of a slot, and values. Each value goes there, all at once. The
   earlier ones go last: their end may run code of Python. */
static PyObject *write_slot(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    const bool are_lists = count == 3 && PyList_Check(arguments[0]) && PyList_Check(arguments[2]);
    if (!are_lists || PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "write_slot(objects, name, values)");
        return nullptr;
    }
    if (!PyList_GET_SIZE(arguments[0])) return Py_NewRef(Py_None);
    const PyMemberDef *member = slot_of(arguments[0], arguments[1]);
    if (!member) return nullptr;
    return guarded([&] {
        std::vector<PyObject *> earlier(PyList_GET_SIZE(arguments[0]));
        for (std::size_t i = 0; i < earlier.size(); i++)
            earlier[i] = std::exchange(*value_in(PyList_GET_ITEM(arguments[0], i), member),
                                       Py_NewRef(PyList_GET_ITEM(arguments[2], i)));
        for (PyObject *value : earlier) Py_XDECREF(value);
        return Py_NewRef(Py_None);
    });
}

/* Arguments: mappings, and a key. A list of what each has under it. */
static PyObject *items(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !PyList_Check(arguments[0])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "this is no list");
        return nullptr;
    }
    return list_of(arguments[0], [arguments](PyObject *x) { return PyObject_GetItem(x, arguments[1]); });
}

/* Passes over the elements of lists on the CPU. */

using namespace at::vec;
using Floats = VectorizedN<float, 2>;  // as many numbers as there are in one vector of 16-bit floats
constexpr int64_t WIDTH = Floats::size(), CHUNK = 32 * WIDTH;  // chunks of all lists fit in a core's cache
constexpr int64_t PIECE = 1 << 15;  // the elements that are worth a thread
constexpr int64_t LONG = 1 << 20;   // the elements during which other threads of Python go on

template <class T> static void widen(const T *from, float *to, int64_t n)
{
    for (int64_t i = 0; i < n; i += WIDTH) {
        const int64_t count = std::min(WIDTH, n - i);
        convert<float, 2, T, 1>(VectorizedN<T, 1>::loadu(from + i, count)).store(to + i, count);
    }
}

template <class T> static void narrow(const float *from, T *to, int64_t n)
{
    for (int64_t i = 0; i < n; i += WIDTH) {
        const int64_t count = std::min(WIDTH, n - i);
        convert<T, 1, float, 2>(Floats::loadu(from + i, count)).store(to + i, count);
    }
}

/* The elements of a tensor in float32, float16 or bfloat16, in the order of memory. */
struct Stream {
    char *memory;
    c10::ScalarType dtype;
    int64_t size;

    const char *end() const { return memory + size * (dtype == c10::kFloat ? 4 : 2); }
    template <class T> T *at(int64_t i) const { return reinterpret_cast<T *>(memory) + i; }

    /* Returns n numbers from i on, in a buffer if they are in 16 bits. */
    float *read(int64_t i, int64_t n, float *buffer) const
    {
        if (dtype == c10::kFloat) return at<float>(i);
        if (dtype == c10::kHalf) widen(at<c10::Half>(i), buffer, n);
        else widen(at<c10::BFloat16>(i), buffer, n);
        return buffer;
    }

    void write(int64_t i, int64_t n, const float *numbers) const
    {
        if (dtype == c10::kFloat) std::memmove(at<float>(i), numbers, n * sizeof *numbers);
        else if (dtype == c10::kHalf) narrow(numbers, at<c10::Half>(i), n);
        else narrow(numbers, at<c10::BFloat16>(i), n);
    }
};

static bool are_finite(const float *numbers, int64_t n)
{
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= numbers[i] - numbers[i] != 0;
    return !bad;
}

static bool is_all(const Floats &mask) { return !(mask[0].zero_mask() | mask[1].zero_mask()); }

/* Lets masters take the values of their parameters where these are not the rounded masters, unless it
   `only_looks`. Returns whether there are any. */
template <class T> static bool merge_some(const T *parameters, float *masters, int64_t n, bool only_looks)
{
    bool found = false;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const int64_t count = std::min(WIDTH, n - i);
        const Floats ours = Floats::loadu(masters + i, count);
        const Floats theirs = convert<float, 2, T, 1>(VectorizedN<T, 1>::loadu(parameters + i, count));
        Floats agree = convert<float, 2, T, 1>(convert<T, 1, float, 2>(ours)) == theirs;
        if (is_all(agree)) continue;
        agree = agree | ((ours != ours) & (theirs != theirs));
        if (count < WIDTH) agree = Floats::set(Floats(0) == Floats(0), agree, count);  // the rest is no element
        if (is_all(agree)) continue;
        found = true;
        if (!only_looks) Floats::blendv(theirs, ours, agree).store(masters + i, count);
    }
    return found;
}

/* What a pass does with the i-th elements x, y and out of lists: see Elementwise in launch_plans.py. */
struct Pass {
    enum What { COPY, CHECK, AXPBY, MERGE } what;  // the first is an unscale too
    float a, b;
    bool checks;

    /* Goes over n elements, at most CHUNK, from i on. Returns whether to set the flag. */
    bool run(const Stream *of, int64_t i, int64_t n) const
    {
        if (what == MERGE) {
            if (of[0].dtype == c10::kHalf) return merge_some(of[0].at<c10::Half>(i), of[1].at<float>(i), n, checks);
            return merge_some(of[0].at<c10::BFloat16>(i), of[1].at<float>(i), n, checks);
        }
        alignas(64) float buffers[3][CHUNK];
        const float *x = of[0].read(i, n, buffers[0]), *ax = x;
        if (a != 1 && !(what == CHECK && std::abs(a) <= 1)) {  // a smaller product is finite as well
            for (int64_t k = 0; k < n; k++) buffers[1][k] = x[k] * a;
            ax = buffers[1];
        }
        if (what == CHECK) return !are_finite(ax, n);
        if (what == COPY) {
            of[1].write(i, n, ax);
            return checks && !are_finite(of[1].read(i, n, buffers[2]), n);
        }
        const bool is_bad = checks && !are_finite(ax, n);
        const float *y = of[1].read(i, n, buffers[2]);
        for (int64_t k = 0; k < n; k++) buffers[0][k] = ax[k] + (b == 1 ? y[k] : b * y[k]);
        of[2].write(i, n, buffers[0]);
        return is_bad;
    }
};

/* Whether torch's functions treat objects of a class as they treat tensors. */
static bool is_usual_class(PyTypeObject *type)
{
    static PyObject *const name = PyUnicode_InternFromString("__torch_function__");
    PyObject *own = _PyType_Lookup(type, name);
    return own == _PyType_Lookup(usual_types[0], name) || own == _PyType_Lookup(usual_types[1], name);
}

/* Finds the elements of a tensor; whether it has its values on the CPU itself, without gaps, and nothing
   that would see an operation of torch, or take another part in it, is to be told. */
static bool find(PyObject *object, Stream &found, bool is_written = false)
{
    using Key = c10::DispatchKey;
    static const c10::DispatchKeySet usual{Key::CPU, Key::ADInplaceOrView, Key::AutogradCPU, Key::AutocastCPU};
    if (!PyObject_TypeCheck(object, tensor_type) || !is_usual_class(Py_TYPE(object))) return false;
    c10::TensorImpl *x = impl_of(object);
    const auto dtype = x->dtype().toScalarType();
    if (x->key_set().raw_repr() & ~usual.raw_repr() || !is_float(dtype) || dtype == c10::kDouble) return false;
    if (!x->is_non_overlapping_and_dense() || (is_written && x->is_inference() && !c10::InferenceMode::is_enabled())) return false;
    if (x->autograd_meta() && reinterpret_cast<const at::TensorBase &>(x->_fw_grad(0, tensor_of(object))).defined()) return false;
    found = {static_cast<char *>(x->mutable_data()), dtype, x->numel()};
    const std::size_t needed = (x->storage_offset() + found.size) * x->dtype().itemsize();
    return !found.size || (found.memory && x->storage().nbytes() >= needed);
}

/* Finds a number of Python, or of a float32 tensor `[1]`. */
static bool find_number(PyObject *x, float &number)
{
    Stream found;
    if (PyFloat_Check(x)) {
        number = static_cast<float>(PyFloat_AS_DOUBLE(x));
        return true;
    }
    if (!find(x, found) || found.dtype != c10::kFloat || found.size != 1 || impl_of(x)->dim() != 1) return false;
    number = *found.at<float>(0);
    return true;
}

/* Finds the streams of the i-th tensors of lists, whose last one may be written; whether they go together. */
static bool find_all(PyObject *lists, Py_ssize_t i, Pass::What what, Stream *of)
{
    const Py_ssize_t last = PyList_GET_SIZE(lists) - 1;
    const c10::TensorImpl *first = nullptr;
    for (Py_ssize_t k = 0; k <= last; k++) {
        PyObject *object = PyList_GET_ITEM(PyList_GET_ITEM(lists, k), i);
        if (!find(object, of[k], k == last && what != Pass::CHECK)) return false;
        const c10::TensorImpl *x = impl_of(object);
        if (!k) first = x;
        const bool are_contiguous = x->is_contiguous() && first->is_contiguous();
        if (x->sizes() != first->sizes() || !(are_contiguous || x->strides() == first->strides())) return false;
    }
    return what != Pass::MERGE || (of[0].dtype != c10::kFloat && of[1].dtype == c10::kFloat);
}

/* Whether no memory that is written is another's too, but for that of the tensor in the same place of a list. */
static bool are_apart(const std::vector<Stream> *lists, std::size_t count)
{
    const std::vector<Stream> &written = lists[count - 1];
    std::vector<std::size_t> order(written.size());
    for (std::size_t i = 0; i < order.size(); i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) { return written[i].memory < written[j].memory; });
    const Stream *before = nullptr;
    for (std::size_t i : order) {
        if (!written[i].size) continue;
        if (before && before->end() > written[i].memory) return false;
        before = &written[i];
    }
    for (std::size_t k = 0; k + 1 < count; k++)
        for (std::size_t i = 0; i < lists[k].size(); i++) {
            const Stream &x = lists[k][i], &own = written[i];
            if (!x.size || (x.memory == own.memory && x.dtype == own.dtype)) continue;
            auto at = std::lower_bound(order.begin(), order.end(), x.end(),
                                       [&](std::size_t j, const char *end) { return written[j].memory < end; });
            while (at != order.begin() && !written[*--at].size) {}  // the last one that begins before its end
            if (at != order.end() && written[*at].size && written[*at].end() > x.memory && written[*at].memory < x.end()) return false;
        }
    return true;
}

/* Makes a pass over lists, tensor after tensor; returns whether to set the flag. */
static bool run_over(const Pass &pass, const std::vector<Stream> *lists, std::size_t count, int threads)
{
    int bad = 0;
    for (std::size_t i = 0; i < lists[0].size(); i++) {
        const Stream of[3] = {lists[0][i], lists[count > 1 ? 1 : 0][i], lists[count > 2 ? 2 : 0][i]};
        const int64_t size = of[0].size;
        if (size > PIECE) {
            #pragma omp parallel for num_threads(threads) reduction(|:bad)
            for (int64_t at = 0; at < size; at += CHUNK) bad |= pass.run(of, at, std::min(CHUNK, size - at));
        } else {
            for (int64_t at = 0; at < size; at += CHUNK) bad |= pass.run(of, at, std::min(CHUNK, size - at));
        }
    }
    return bad;
}

/* Arguments: the name of a pass, its lists of tensors, two factors, a flag or None, and how many threads
   there are. Makes the pass; returns whether it has, all or nothing. */
static PyObject *go_over(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    static const struct { const char *name; Pass::What what; Py_ssize_t lists; } passes[] = {
        {"copy", Pass::COPY, 2}, {"unscale", Pass::COPY, 2}, {"check", Pass::CHECK, 1},
        {"axpby", Pass::AXPBY, 3}, {"merge", Pass::MERGE, 2},
    };
    const char *name = count == 6 && PyUnicode_Check(arguments[0]) ? PyUnicode_AsUTF8(arguments[0]) : nullptr;
    const auto *known = std::find_if(passes, std::end(passes), [=](auto &each) { return name && !std::strcmp(each.name, name); });
    PyObject *lists = count == 6 ? arguments[1] : nullptr;
    if (known == std::end(passes) || !PyList_Check(lists) || PyList_GET_SIZE(lists) != known->lists) {
        PyErr_SetString(PyExc_TypeError, "go_over(name, lists, a, b, flag, threads)");
        return nullptr;
    }
    const int threads = static_cast<int>(PyLong_AsLong(arguments[5]));
    if (PyErr_Occurred()) return nullptr;
    const Py_ssize_t streams = known->lists;
    for (Py_ssize_t k = 0; k < streams; k++)
        if (!PyList_Check(PyList_GET_ITEM(lists, k))) Py_RETURN_FALSE;
    const Py_ssize_t n = PyList_GET_SIZE(PyList_GET_ITEM(lists, 0));
    for (Py_ssize_t k = 1; k < streams; k++)
        if (PyList_GET_SIZE(PyList_GET_ITEM(lists, k)) != n) Py_RETURN_FALSE;
    return guarded([&]() -> PyObject * {
        if (is_backend_set() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return Py_NewRef(Py_False);
        Pass pass{known->what, 1, 1, arguments[4] != Py_None};
        Stream flag{nullptr, c10::kFloat, 0};
        const bool has_numbers = find_number(arguments[2], pass.a) && find_number(arguments[3], pass.b);
        if (!has_numbers || (pass.checks && !find(arguments[4], flag, true))) return Py_NewRef(Py_False);
        if (pass.checks && (flag.dtype != c10::kFloat || flag.size != 1)) return Py_NewRef(Py_False);
        std::vector<Stream> of[3];
        int64_t total = 0;
        for (Py_ssize_t i = 0; i < n; i++) {
            Stream found[3];
            if (!find_all(lists, i, pass.what, found)) return Py_NewRef(Py_False);
            for (Py_ssize_t k = 0; k < streams; k++) {
                if (flag.memory < found[k].end() && found[k].memory < flag.end()) return Py_NewRef(Py_False);
                of[k].push_back(found[k]);
            }
            total += found[0].size;
        }
        const bool writes = pass.what == Pass::COPY || pass.what == Pass::AXPBY;
        if (pass.what != Pass::CHECK && !are_apart(of, streams)) return Py_NewRef(Py_False);
        std::vector<c10::Storage> kept;  // other threads may move tensors meanwhile
        if (pass.checks) kept.push_back(impl_of(arguments[4])->storage());
        for (Py_ssize_t k = 0; k < streams; k++)
            for (Py_ssize_t i = 0; i < n; i++) {
                c10::TensorImpl *x = impl_of(PyList_GET_ITEM(PyList_GET_ITEM(lists, k), i));
                if (total >= LONG) kept.push_back(x->storage());
                if (writes && k == streams - 1 && !x->is_inference()) x->bump_version();
            }
        PyThreadState *const others = total < LONG ? nullptr : PyEval_SaveThread();
        const bool is_bad = run_over(pass, of, streams, threads);
        if (others) PyEval_RestoreThread(others);
        if (is_bad && pass.checks) *flag.at<float>(0) = 1;
        return Py_NewRef(Py_True);
    });
}

/* Arguments: a tensor, and a list of numbers. Writes them to it, if it is float32 `[n]` on the CPU and there
   are as many; returns whether it has. */
static PyObject *put(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count)) return nullptr;
    PyObject *list = arguments[1];
    return guarded([&]() -> PyObject * {
        Stream to;
        if (!find(arguments[0], to, true) || to.dtype != c10::kFloat || impl_of(arguments[0])->dim() != 1) return Py_NewRef(Py_False);
        if (!PyList_Check(list) || PyList_GET_SIZE(list) != to.size || c10::impl::TorchDispatchModeTLS::any_modes_set())
            return Py_NewRef(Py_False);
        for (int64_t i = 0; i < to.size; i++)
            if (!PyFloat_CheckExact(PyList_GET_ITEM(list, i))) return Py_NewRef(Py_False);
        for (int64_t i = 0; i < to.size; i++)
            *to.at<float>(i) = static_cast<float>(PyFloat_AS_DOUBLE(PyList_GET_ITEM(list, i)));
        if (!impl_of(arguments[0])->is_inference()) impl_of(arguments[0])->bump_version();
        return Py_NewRef(Py_True);
    });
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL
static PyMethodDef methods[] = {
    {"prepare", FAST(prepare), nullptr},               {"addresses", addresses, METH_O, nullptr},
    {"versions", versions, METH_O, nullptr},           {"have_grads", FAST(have_grads), nullptr},
    {"train", FAST(train), nullptr},                   {"are_together", FAST(are_together), nullptr},
    {"have_dtypes", FAST(have_dtypes), nullptr},       {"clear_grads", clear_grads, METH_O, nullptr},
    {"set_grads", FAST(set_grads), nullptr},           {"are_floats", are_floats, METH_O, nullptr},
    {"kind", kind, METH_O, nullptr},                   {"go_together", go_together, METH_O, nullptr},
    {"numbers", numbers, METH_O, nullptr},             {"add", FAST(add), nullptr},
    {"are_at", FAST(are_at), nullptr},                 {"increment", increment, METH_O, nullptr},
    {"shards", shards, METH_O, nullptr},               {"are_all_same", FAST(are_all_same), nullptr},
    {"are_same", FAST(are_same), nullptr},             {"items", FAST(items), nullptr},
    {"are_of_kind", FAST(are_of_kind), nullptr},       {"read_slot", FAST(read_slot), nullptr},
    {"write_slot", FAST(write_slot), nullptr},         {"go_over", FAST(go_over), nullptr},
    {"put", FAST(put), nullptr},                       {"have_memory", have_memory, METH_O, nullptr},
    {"are_whole", are_whole, METH_O, nullptr},         {"take_any_grad", take_any_grad, METH_O, nullptr},
    {"rows", rows, METH_O, nullptr},                   {"with_grad", with_grad, METH_O, nullptr},
    {"agree", FAST(agree), nullptr},
    {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "host_lists", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_host_lists() { return PyModule_Create(&module); }
