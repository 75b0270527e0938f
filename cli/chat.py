"""`qtool chat`: talk to a model in the terminal, answers streamed as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.common import Device, Model, Quiet, Reporter
from qtool.cli.engine_options import HeadDtype, KVCacheDtype, check_head_dtype, check_kv_cache_dtype
from qtool.quant.errors import QtoolError

if TYPE_CHECKING:
    from qtool.runtime.engine.params import SamplingParams
    from qtool.runtime.llm_engine import LLMEngine


def command(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="System message that opens the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of one answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling, in (0, 1].")] = 0.9,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the answers repeatable.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    head_dtype: HeadDtype = "auto",
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Chat with a model. One line is one message; Ctrl-C ends an answer, Ctrl-D the chat."""
    from qtool.runtime.engine.params import SamplingParams
    from qtool.runtime.llm_engine import LLMEngine

    check_kv_cache_dtype(kv_cache_dtype)
    check_head_dtype(head_dtype)
    reporter = Reporter(quiet=quiet)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with reporter.progress() as progress:
        engine = LLMEngine(
            model,
            dtype=dtype,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            head_dtype=head_dtype,
            max_num_seqs=1,
            progress=progress,
        )
    if not getattr(engine.tokenizer, "chat_template", None):
        raise QtoolError(f"{model}: its tokenizer has no chat template, so it is not a chat model")
    reporter.say("Ctrl-C ends an answer, Ctrl-D the chat.")
    interactive = sys.stdin.isatty()
    messages = [{"role": "system", "content": _text(system, "--system")}] if system else []
    for line in _lines("> " if interactive else ""):
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(engine, messages, params, _show)
        except QtoolError as error:
            messages.pop()
            if not interactive:
                raise
            reporter.warn(str(error))
            continue
        messages.append({"role": "assistant", "content": answer})


def _lines(prompt: str) -> Iterator[str]:
    """Lines of stdin until its end; an interrupt at the prompt ends them too. Raises QtoolError for what is no text."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise QtoolError(f"stdin: not text in {error.encoding}: {error.reason}") from None
        yield _text(line, "stdin")


def _text(text: str, where: str) -> str:
    """`text`, unless it holds what the terminal could not decode. Raises QtoolError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QtoolError(f"{where}: not text in UTF-8: {text[:40]!r}") from None
    return text


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _answer(
    engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, show: Callable[[str], None]
) -> str:
    """Generate one answer, showing it as it grows; what there was of it where Ctrl-C ended it."""
    from qtool.runtime.engine.params import FAILURES

    try:
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates raise what they like to refuse a conversation
        raise QtoolError(f"the model's chat template refuses the conversation: {error}") from None
    room = engine.max_model_len - len(ids)
    if room < 1:
        raise QtoolError(f"the conversation exceeds the context of {engine.max_model_len} tokens: start a new chat")
    engine.add_request("chat", ids, params)
    shown = ""
    try:
        while engine.has_unfinished():
            for output in engine.step():
                answer = output.outputs[0]
                show(answer.text[len(shown) :])
                shown = answer.text
                if answer.finish_reason in FAILURES:
                    raise QtoolError(f"the model failed: {answer.stop_reason}")
    except KeyboardInterrupt:
        engine.abort_request("chat")
    show("\n")
    return shown
