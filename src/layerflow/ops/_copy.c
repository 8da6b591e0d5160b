#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", "Scattered copies without the GIL.", -1, NULL};
PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&module); }
