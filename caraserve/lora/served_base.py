"""Compares what an adapter's folder says with the base model that is served: its name, chat template and tokens."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from caraserve.core.adapter_facts import AdapterFacts
from caraserve.core.adapter_rules import MAX_CHAT_TEMPLATE_BYTES
from caraserve.errors import AdapterRejected
from caraserve.lora.base_names import Likeness, is_in, is_quantised, likeness
from caraserve.lora.folder_texts import read_added_tokens, read_template
from caraserve.lora.inspections import Inspection
from caraserve.lora.peft_fields import refusal, shown

log = logging.getLogger(__name__)

_BASE_FIELD = "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base model, and how strictly adapters must fit it.

    `names`: of `names_of_base`. `template`: its chat template. `has_token`: returns whether its tokenizer has a token.
    `requires_name`: whether adapters must name it. `takes_templates`: whether adapters' own chat templates are used.
    `card`: what its file says about where it comes from. `formats`: of its weights, as `DecoderPlan.format_names`.
    """

    names: tuple[str, ...] = ()
    template: str | None = None
    has_token: Callable[[str], bool] = lambda token: True
    requires_name: bool = False
    takes_templates: bool = False
    card: Mapping[str, Any] = field(default_factory=dict, hash=False)
    formats: str = ""

    def is_other(self, facts: AdapterFacts) -> bool:
        """Returns whether an adapter was trained on another base model."""
        return likeness(facts.trained_on, self.names) is Likeness.OTHER

    def refusal(self, trained_on: str) -> AdapterRejected | None:
        """Returns why an adapter of that base model is refused; None if it is not."""
        if not self.requires_name or likeness(trained_on, self.names) is Likeness.SAME:
            return None
        what = f"is {shown(trained_on)}" if trained_on else "is missing"
        served = f"takes adapters of {self._name}" if self.names else "needs a --served-model-name to compare it with"
        return refusal(_BASE_FIELD, f"{what}, and --require-base-name {served}")

    def facts_of(self, folder: Path, found: Inspection) -> AdapterFacts:
        """Returns the facts of an adapter that has been inspected. Raises AdapterRejected for another base model, if
        that is refused, and for a chat template that cannot be used, if it would be."""
        if (refused := self.refusal(found.trained_on)) is not None:
            raise refused
        added: set[str] = set()
        with suppress(AdapterRejected):  # they are only reported
            added = {token for token in read_added_tokens(folder) if not self.has_token(token)}
        template = self.own_template(folder)
        digest = "" if template is None else hashlib.sha256(template.encode(errors="replace")).hexdigest()
        return replace(facts_so_far(found), added_tokens=len(added), template_digest=digest)

    def own_template(self, folder: Path) -> str | None:
        """Returns the chat template in an adapter's folder; None without one, or if it is the base model's. Raises
        AdapterRejected if it would be used, and cannot be."""
        try:
            template = read_template(folder)
            if template is not None and (size := len(template.encode(errors="replace"))) > MAX_CHAT_TEMPLATE_BYTES:
                raise AdapterRejected(f"the chat template has {size} bytes; {MAX_CHAT_TEMPLATE_BYTES} are allowed")
        except AdapterRejected:
            if self.takes_templates:
                raise
            return None
        is_same = template is None or (self.template is not None and template.strip() == self.template.strip())
        return None if is_same else template

    def report(self, name: str, facts: AdapterFacts) -> None:
        """Logs in what an adapter that was loaded differs from the base model."""
        if self.is_other(facts):
            log.warning(
                "adapter %s was trained on %r; its answers may be wrong on %s", name, facts.trained_on, self._name
            )
        for remark in self._remarks(facts):
            log.info("adapter %s %s", name, remark)

    @property
    def _name(self) -> str:
        return " or ".join(map(repr, self.names))

    def _remarks(self, facts: AdapterFacts) -> Iterator[str]:
        if is_quantised(facts.trained_on) and not (self.is_other(facts) or is_in(facts.trained_on, self.formats)):
            yield f"was trained on quantised weights, {facts.trained_on!r}; those served are {self.formats}"
        if facts.template_digest:
            use = "is used" if self.takes_templates else "is not used; --adapter-chat-templates uses it"
            yield f"has a chat template of its own, which {use}"
        if facts.added_tokens:
            yield f"has {facts.added_tokens} tokens in its tokenizer that the base model's, which is used, lacks"


def facts_so_far(found: Inspection) -> AdapterFacts:
    """Returns the facts of an adapter that is still arriving."""
    return AdapterFacts(found.trained_on, found.num_classes)


ANY_BASE = ServedBase()  # with which every adapter agrees
