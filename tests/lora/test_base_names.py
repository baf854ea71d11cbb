"""Names of base models, as adapters' configurations and users write them, compared with the one that is served."""

import pytest

from caraserve.lora.base_names import Likeness, is_in, is_quantised, likeness, names_of_base
from caraserve.model.dtype import Dtype
from caraserve.model.formats.awq import Awq
from caraserve.model.formats.bitsandbytes import EIGHT_BITS, FourBits
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.gptq import Gptq
from caraserve.model.formats.grouped import Scale
from caraserve.model.formats.packed import NVFP4, PACKED_MXFP4, PackedIntegers
from caraserve.model.formats.scaled_codes import Inputs

LLAMA = names_of_base(["Llama-3.1-8B-Instruct"])


@pytest.mark.parametrize(
    "trained_on",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "llama-3.1-8b-instruct/",
        "/home/me/models/Llama-3.1-8B-Instruct/",
        "/home/me/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc8",
    ],
)
def test_organisation_case_folders_and_slashes_make_no_other_base(trained_on: str) -> None:
    assert likeness(trained_on, LLAMA) is Likeness.SAME
    assert not is_quantised(trained_on)


@pytest.mark.parametrize(
    "mark", ["bnb-4bit", "unsloth-bnb-4bit", "GPTQ", "GPTQ-Int4", "AWQ", "awq-int4", "FP8", "FP8-dynamic", "nf4"]
)
def test_a_mark_of_quantisation_makes_no_other_base(mark: str) -> None:
    assert likeness(f"unsloth/Llama-3.1-8B-Instruct-{mark}", LLAMA) is Likeness.SAME
    assert is_quantised(f"unsloth/Llama-3.1-8B-Instruct-{mark}")


FORMATS = {
    "bnb-4bit": FourBits.of("nf4", Dtype.BF16),
    "bnb-8bit": EIGHT_BITS,
    "GPTQ-Int4": Gptq.of(4, 128, symmetric=True, zero_step=1, has_order=False),
    "GPTQ-Int8": Gptq.of(8, 128, symmetric=True, zero_step=1, has_order=False),
    "AWQ": Awq.of(128),
    "quantized.w4a16": PackedIntegers.of(4, 128, Scale.BF16, symmetric=True),
    "FP8-dynamic": Fp8(Inputs.PER_TOKEN),
    "NVFP4": NVFP4,
    "MXFP4": PACKED_MXFP4,
}


@pytest.mark.parametrize("mark", FORMATS)
def test_marks_of_quantisation_are_those_of_one_format(mark: str) -> None:
    name = f"unsloth/Llama-3.1-8B-Instruct-{mark}"
    assert [other for other, form in FORMATS.items() if is_in(name, f"bfloat16; {form.name}")] == [mark]
    assert not is_in(name, "bfloat16")


def test_dots_of_a_version_are_no_mark_of_quantisation() -> None:
    assert likeness("RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16", LLAMA) is Likeness.SAME
    assert likeness("Llama-3.1-8B-Instruct", names_of_base(["Llama-3.2-8B-Instruct"])) is Likeness.OTHER


@pytest.mark.parametrize(
    "trained_on",
    [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "Qwen/Qwen3-8B",
        "gpt2",
        "Llama-3.1-8B-Instruct-v2",
    ],
)
def test_another_name_is_another_base(trained_on: str) -> None:
    assert likeness(trained_on, LLAMA) is Likeness.OTHER


@pytest.mark.parametrize(
    "trained_on",
    [
        "",
        "model",
        "./base_model",
        "/data/mine",
        "~/mine",
        "C:\\mine",
        "out/run/7",
        "checkpoint-500",
        "0e9e39f249a1697691",
        ".",
    ],
)
def test_a_name_that_says_nothing_is_no_other_base(trained_on: str) -> None:
    assert likeness(trained_on, LLAMA) is Likeness.UNKNOWN


def test_a_base_model_has_every_name_that_says_something() -> None:
    served = names_of_base(["prod", "/models/model", "Qwen/Qwen3-8B-FP8"])
    assert [likeness(name, served) for name in ("Qwen/Qwen3-8B", "prod")] == [Likeness.SAME, Likeness.SAME]
    assert likeness("Qwen/Qwen3-8B", names_of_base(["model"])) is Likeness.UNKNOWN
