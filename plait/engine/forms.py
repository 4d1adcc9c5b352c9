"""What a caller asks of an answer's form and of its reasoning, in the words of the model and the prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from plait.core.sampling_params import SamplingParams, Structure
from plait.engine.outputs import RequestRefused
from plait.text.chat import ChatTemplate
from plait.text.parsing import OutputFormat
from plait.text.structure import FormError, of_structured_outputs
from plait.text.tokenizer import Tokenizer

_TAIL = 32
"""Tokens of a prompt in which the beginning of reasoning is looked for."""


class Forms:
    """Turns ``structured_outputs`` and ``thinking_token_budget`` into what an engine process is told.

    Args:
        tokenizer, template: the model's; the template shows how it writes its reasoning.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @cached_property
    def _format(self) -> OutputFormat | None:
        if self._tokenizer is None or self._template is None:
            return None
        return OutputFormat(self._tokenizer, self._template.source)

    def applied(
        self, params: SamplingParams, text: str | None, tokens: list[int], rendered: bool
    ) -> SamplingParams:
        """The parameters for one prompt.

        Args:
            text, tokens: the prompt.
            rendered: it is a conversation, so that a model that thinks may begin to. Any other prompt has the
                form begin at once, unless it ends inside the reasoning.

        Raises:
            RequestRefused: a form that cannot be had, or a budget for reasoning that is not told apart.
        """
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return params
        if text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(tokens[-_TAIL:], skip_special_tokens=False)
        thinks = self._format is not None and (rendered or self._format.ends_inside(text or ""))
        changed = replace(params, structured_outputs=None, thinking_token_budget=None)
        if params.thinking_token_budget is not None:
            if self._format is None or not thinks:
                raise RequestRefused(
                    "thinking_token_budget bounds the reasoning of a conversation, or of a prompt that ends "
                    "inside the reasoning; this prompt is neither"
                )
            try:
                budget = self._format.thinking_budget(text or "", params.thinking_token_budget)
            except ValueError:
                message = "thinking_token_budget: the chat template shows no format of reasoning"
                raise RequestRefused(message) from None
            changed = replace(changed, thinking_budget=budget)
        if params.structured_outputs is None:
            return changed
        try:
            asked = of_structured_outputs(params.structured_outputs.given())
        except FormError as fault:
            raise RequestRefused(str(fault)) from None
        assert asked is not None
        _, grammar, _ = asked
        if self._format is None or not thinks:
            return replace(changed, structure=Structure(grammar))
        return replace(changed, structure=self._format.structure(grammar, text or ""))
