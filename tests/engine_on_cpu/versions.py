"""The libraries' versions that the Engine asks for: those it is built with in its wheels for CUDA 13."""


def get_cublasLt_version() -> int:
    """13.1."""
    return 130100


def get_cudnn_version() -> int:
    """9.20."""
    return 92000


def get_num_cublas_streams() -> int:
    """Streams of grouped products."""
    return 4
