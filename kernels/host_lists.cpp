/* Functions of lists of tensors for host_lists.py, which reads the same answers in Python without them.

   Only small headers of torch: where a tensor's pointer lies in its Python object is found at load. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ATen/core/TensorBase.h>
#include <utility>
#include <vector>

static Py_ssize_t place = -1;
static PyTypeObject *tensor_type = nullptr;
static PyObject *dtypes[static_cast<int>(c10::ScalarType::NumOptions)];  // of Python; null for rare ones

static c10::TensorImpl *impl_of(PyObject *x)
{
    return *reinterpret_cast<c10::TensorImpl **>(reinterpret_cast<char *>(x) + place);
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
    for (Py_ssize_t i = 0; place >= 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *x = PyList_GET_ITEM(list, i), *dtype = PyObject_GetAttrString(x, "dtype");
        if (!dtype) return nullptr;
        dtypes[static_cast<int>(impl_of(x)->dtype().toScalarType())] = dtype;
    }
    return PyBool_FromLong(place >= 0);
}

/* A tuple of the address of each tensor's elements. */
static PyObject *addresses(PyObject *, PyObject *list)
{
    if (!are_tensors(list, -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *result = PyTuple_New(n);
    PyObject *filled = result ? guarded([&]() -> PyObject * {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *address = PyLong_FromVoidPtr(impl_of(PyList_GET_ITEM(list, i))->mutable_data());
            if (!address) return nullptr;
            PyTuple_SET_ITEM(result, i, address);
        }
        return result;
    }) : nullptr;
    if (!filled) Py_XDECREF(result);
    return filled;
}

/* A list of what a function makes of each tensor, or null if it makes none, with its error. */
template <class F> static PyObject *list_of(PyObject *list, F make)
{
    if (!are_tensors(list, -1)) return nullptr;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject *result = PyList_New(n);
    PyObject *filled = result ? guarded([&]() -> PyObject * {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *made = make(PyList_GET_ITEM(list, i));
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
    return list_of(list, [](PyObject *x) { return PyLong_FromLong(impl_of(x)->version_counter().current_version()); });
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
            PyObject *grad = PyList_GET_ITEM(arguments[1], i);
            const auto &own = reinterpret_cast<const at::TensorBase &>(impl_of(PyList_GET_ITEM(arguments[0], i))->grad());
            all = grad == Py_None ? !own.defined() : own.defined() && own.unsafeGetTensorImpl() == impl_of(grad);
        }
        return PyBool_FromLong(all);
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
            grads[i] = at::TensorBase(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(own));
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(arguments[0], i));
            if (grads[i].defined() || reinterpret_cast<const at::TensorBase &>(impl->grad()).defined())
                std::swap(grads[i], reinterpret_cast<at::TensorBase &>(impl->mutable_grad()));
        }
        return PyBool_FromLong(true);
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

/* Arguments: tensors, and a list of one. Whether each has its dtype. */
static PyObject *have_dtype(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (!are_two(count) || !are_tensors(arguments[0], -1) || !are_tensors(arguments[1], 1)) return nullptr;
    return guarded([&] {
        const auto dtype = impl_of(PyList_GET_ITEM(arguments[1], 0))->dtype();
        bool all = true;
        for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(arguments[0]); i++)
            all = impl_of(PyList_GET_ITEM(arguments[0], i))->dtype() == dtype;
        return PyBool_FromLong(all);
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
            PyObject *dtype = Py_XNewRef(dtypes[static_cast<int>(impl->dtype().toScalarType())]);
            if (!dtype) dtype = PyObject_GetAttrString(x, "dtype");
            if (!dtype) return nullptr;
            PyTuple_SET_ITEM(of, i, dtype);
        }
        return Py_BuildValue("(OOO)", sizes, of, are_contiguous ? Py_True : Py_False);
    });
    Py_XDECREF(sizes);
    Py_XDECREF(of);
    return filled;
}

/* Whether lists of tensors go to an operation of the CPU as they are; see host_lists.py. */
static PyObject *go_together(PyObject *, PyObject *lists)
{
    if (!PyList_Check(lists) || !PyList_GET_SIZE(lists)) {
        PyErr_SetString(PyExc_TypeError, "this is no list of lists");
        return nullptr;
    }
    PyObject *first = PyList_GET_ITEM(lists, 0);
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(lists); k++)
        if (!are_tensors(PyList_GET_ITEM(lists, k), -1)) return nullptr;
    return guarded([&] {
        bool all = PyList_GET_SIZE(first) > 0;
        for (Py_ssize_t k = 0; all && k < PyList_GET_SIZE(lists); k++) {
            PyObject *list = PyList_GET_ITEM(lists, k);
            if (PyList_GET_SIZE(list) != PyList_GET_SIZE(first)) return PyBool_FromLong(false);
            const auto dtype = impl_of(PyList_GET_ITEM(list, 0))->dtype().toScalarType();
            all = is_float(dtype);
            for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(list); i++) {
                c10::TensorImpl *impl = impl_of(PyList_GET_ITEM(list, i));
                all = impl->dtype().toScalarType() == dtype && impl->device().is_cpu()
                    && impl->layout() == c10::kStrided && impl->mutable_data()
                    && (!k || impl->sizes() == impl_of(PyList_GET_ITEM(first, i))->sizes());
            }
        }
        return PyBool_FromLong(all);
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

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL
static PyMethodDef methods[] = {
    {"prepare", FAST(prepare), nullptr},       {"addresses", addresses, METH_O, nullptr},
    {"versions", versions, METH_O, nullptr},   {"have_grads", FAST(have_grads), nullptr},
    {"train", FAST(train), nullptr},           {"are_together", FAST(are_together), nullptr},
    {"have_dtype", FAST(have_dtype), nullptr}, {"clear_grads", clear_grads, METH_O, nullptr},
    {"set_grads", FAST(set_grads), nullptr},   {"are_floats", are_floats, METH_O, nullptr},
    {"kind", kind, METH_O, nullptr},           {"go_together", go_together, METH_O, nullptr},
    {"numbers", numbers, METH_O, nullptr},     {"add", FAST(add), nullptr},
    {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "host_lists", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_host_lists() { return PyModule_Create(&module); }
