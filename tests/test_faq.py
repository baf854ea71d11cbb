"""Each answer of docs/faq.md has a test that shows it, named here."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTIONS = re.findall(r"^### (.+)$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
SHOWN_BY = {
    "Does it need a GPU?": "tests/test_docs.py::test_every_block_to_copy_works_in_its_order",
    "Which models can it serve?": "tests/families/test_readme.py::test_the_readme_lists_what_is_served",
    "Can it use several GPUs for one model?": (
        "tests/cli/test_options.py::test_unsupported_options_are_refused_with_advice"
    ),
    "Does it download models or adapters?": (
        "tests/model/test_not_a_model.py::test_what_does_not_exist_and_looks_like_a_name_of_the_hub_is_fetched_by_hf"
    ),
    "How many adapters can it serve?": (
        "tests/lora/test_registry.py::test_ten_thousand_adapters_are_put_and_found_again_in_two_seconds_of_cpu"
    ),
    "What if an adapter is not loaded when a request names it?": (
        "tests/oracle/test_loading_modes.py::test_every_mode_answers_like_peft"
    ),
    "Why is the first token of an adapter slow?": (
        "tests/lora/test_manager.py::test_an_adapter_pinned_in_host_memory_is_read_at_once_and_stays_there"
    ),
    "Are the outputs the same as PEFT's?": "tests/oracle/test_engine.py::test_every_family_answers_like_peft",
    "Does an answer depend on what else is in the batch?": (
        "tests/cpu/test_kernels.py::test_a_row_has_the_same_bits_in_any_batch"
    ),
    "Are adapters merged into the weights?": (
        "tests/oracle/test_merged.py::test_a_lone_adapter_runs_merged_from_its_first_token_to_its_last"
    ),
    "Which ranks, and which mix of them?": (
        "tests/oracle/test_padded_kernel.py::"
        "test_tokens_are_those_of_peft_in_batches_of_mixed_ranks_and_prefills_beside_them"
    ),
    "Which kinds of adapters?": (
        "tests/oracle/test_adapter_kinds.py::test_adapters_of_all_kinds_in_one_batch_answer_like_peft"
    ),
    "Can adapters of another base model be served?": (
        "tests/lora/test_served_base.py::test_an_adapter_of_another_base_is_loaded_with_a_warning"
    ),
    "Can one request use several adapters?": (
        "tests/oracle/test_combinations.py::test_combinations_beside_others_in_a_batch_answer_like_peft"
    ),
    "How do I replace an adapter while it is in use?": (
        "tests/oracle/test_uploads.py::test_an_adapter_that_is_being_replaced_serves_until_the_new_one_is_complete"
    ),
    "Why does it say 404 although the folder is there?": (
        "tests/http/management/test_adapter_changes.py::"
        "test_why_a_folder_is_not_served_is_told_to_those_who_may_use_its_name"
    ),
    "Why do I get 409?": "tests/lora/test_turns.py::test_the_refusals_of_changes_and_uploads_say_when_to_try_again",
    "Why do I get 429?": "tests/http/apis/test_openai_client.py::test_client_tries_again_when_the_queue_was_full",
    'Why do I get 403 with "Host … is not this machine\'s name"?': (
        "tests/http/test_server.py::test_a_local_server_without_keys_has_the_names_of_its_allowed_origins"
    ),
    "Which clients work?": "tests/http/apis/test_openai_client.py::test_chat_stream",
    "Can I get the same sampled answer again?": "tests/test_server.py::test_a_seed_repeats_a_sampled_answer",
    "Do tools and JSON schemas work with every adapter?": (
        "tests/http/apis/test_tool_calls.py::test_a_model_without_tools_refuses_them_and_names_the_cure"
    ),
    "Can requests have images?": "tests/http/apis/test_chat.py::test_bad_fields_are_named",
    "Why does a long prompt take so long, and can I see how far it is?": (
        "tests/http/test_streaming.py::test_a_prompt_that_takes_long_has_comments_with_its_progress"
    ),
    "Is anything of prompts or answers stored?": (
        "tests/http/test_request_log.py::test_clients_can_forge_no_line_and_their_prompts_are_not_logged"
    ),
    "What happens when an instance dies?": (
        "tests/http/test_forwarding.py::test_an_instance_that_dies_before_its_first_byte_is_replaced_by_another"
    ),
    "Is it ready for production?": "tests/test_readme.py::test_named_files_exist",
}


def test_each_answer_has_a_test_that_shows_it() -> None:
    assert list(SHOWN_BY) == QUESTIONS
    for question, shown in SHOWN_BY.items():
        path, _, name = shown.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), question
