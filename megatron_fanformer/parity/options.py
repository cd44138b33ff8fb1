"""The options of `parity`; imports nothing that is slow."""

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `parity` takes."""
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=(),
        metavar="LAYOUT",
        help='such as tp=2,sp=true or "dp=2,distributed_optimizer=true,cp=2" (the configuration\'s own)',
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to train (20)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights and activations (fp32)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="what to run on (auto)")
    parser.add_argument(
        "--transformer-impl",
        choices=("auto", "local", "transformer_engine"),
        default="auto",
        metavar="LAYERS",
        help="local (megatron-core's and torch's), transformer_engine, or auto: the Engine's if they import (auto)",
    )
    parser.add_argument("--communication", action="store_true", help="count the bytes that a step's collectives move")
    parser.add_argument("--report", metavar="FILE", help="write everything as JSON")
