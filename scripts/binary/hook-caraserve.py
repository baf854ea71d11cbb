"""Read by PyInstaller: the sources of the package become part of the executable, which names its kernels by them."""

module_collection_mode = "pyz+py"
