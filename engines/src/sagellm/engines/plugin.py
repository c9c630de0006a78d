"""What this package offers: the engine, the model families, the torch backends, and commands."""

from sagellm.core import Command, Provider, hookimpl

_PACKAGE = "sagellm.engines"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    attention, models = f"{_PACKAGE}.attention", f"{_PACKAGE}.models"
    processors, parsers = f"{_PACKAGE}.sampling.processors", f"{_PACKAGE}.parsers"
    torch_backend = f"{_PACKAGE}.forward.torch_backend:TorchForwardBackend"
    return [
        Provider("engine", "llm", f"{_PACKAGE}.assembly:load_core", "this package's own, over paged KV"),
        Provider("model_family", "qwen3", f"{models}.families:Qwen3Family", "Qwen3"),
        Provider("model_family", "qwen2", f"{models}.families:Qwen2Family", "Qwen2 and Qwen2.5"),
        Provider("model_family", "llama", f"{models}.families:LlamaFamily", "Llama 3.x"),
        Provider("model_family", "mistral", f"{models}.families:MistralFamily", "Mistral, sliding window"),
        Provider(
            "model_family",
            "transformers",
            f"{models}.transformers_family:TransformersFamily",
            "other decoders, through transformers itself over paged KV",
        ),
        Provider(
            "checkpoint_format",
            "safetensors",
            f"{_PACKAGE}.loading.checkpoint:SafetensorsFormat",
            "Hugging Face's layout",
        ),
        *_quantized_formats(),
        Provider(
            "checkpoint_format", "gguf", f"{_PACKAGE}.loading.gguf:GGUFFormat", "llama.cpp's, in one file"
        ),
        Provider("forward_backend", "torch", torch_backend, "torch operators, layer by layer"),
        Provider(
            "executor",
            "inline",
            f"{_PACKAGE}.worker.inline_executor:InlineExecutor",
            "in the thread that plans",
        ),
        Provider(
            "executor",
            "overlapped",
            f"{_PACKAGE}.worker.inline_executor:OverlappedExecutor",
            "planned while the device computes the last one",
        ),
        Provider("attention_backend", "naive", f"{attention}.naive:TorchNaiveBackend", "the reference"),
        Provider("attention_backend", "sdpa", f"{attention}.sdpa:SDPABackend", "torch's fused attention"),
        Provider(
            "draft_proposer",
            "ngram",
            f"{_PACKAGE}.drafts.ngram:NgramProposer",
            "what followed before",
            recommended_for="answers that repeat their prompt",
            measured="2.20 times as fast at editing code, 1.42 at JSON, 1.00 at chat",
        ),
        Provider(
            "draft_proposer",
            "suffix",
            f"{_PACKAGE}.drafts.suffix:SuffixProposer",
            "what followed most often, in earlier answers too",
            recommended_for="agents",
            measured="1.89 times as fast when agents do alike again",
        ),
        Provider("grammar", "xgrammar", f"{_PACKAGE}.grammar.provider:XGrammar", "the extra grammar"),
        Provider("logits_processor", "logit_bias", f"{processors}:LogitBias", "adds to the logits of tokens"),
        Provider("logits_processor", "min_tokens", f"{processors}:MinTokens", "no end before min_tokens"),
        Provider(
            "logits_processor",
            "allowed_token_ids",
            f"{processors}:AllowedTokenIds",
            "nothing but these tokens",
        ),
        Provider("logits_processor", "bad_words", f"{processors}:BadWords", "never these words"),
        Provider("tool_parser", "hermes", f"{parsers}.hermes:HermesToolParser", "JSON in <tool_call> tags"),
        Provider("tool_parser", "qwen3", f"{parsers}.qwen3:Qwen3ToolParser", "XML in <tool_call> tags"),
        Provider("tool_parser", "llama3", f"{parsers}.llama3:Llama3ToolParser", "JSON as the answer"),
        Provider("tool_parser", "mistral", f"{parsers}.mistral:MistralToolParser", "after [TOOL_CALLS]"),
        Provider("reasoning_parser", "qwen3", f"{parsers}.reasoning:ThinkParser", "in <think> tags"),
        Provider(
            "reasoning_parser",
            "deepseek_r1",
            f"{parsers}.reasoning:DeepSeekR1Parser",
            "up to </think>, with or without <think>",
        ),
    ]


def _quantized_formats() -> list[Provider]:
    formats = (
        ("compressed-tensors", "compressed_tensors:CompressedTensorsFormat", "as llm-compressor writes them"),
        ("gptq", "gptq:GPTQFormat", "4 and 8 bits, with act order or without"),
        ("awq", "awq:AWQFormat", "4 bits with zero points"),
        ("fp8", "fp8:FP8Format", "FP8 by block, row or tensor, as DeepSeek's and Qwen's"),
        ("mxfp4", "mxfp4:MXFP4Format", "4-bit floats by 32, linears"),
        ("torchao", "torchao:TorchAOFormat", "INT8, INT4 and FP8, as transformers saves them"),
    )
    return [
        Provider("checkpoint_format", name, f"{_PACKAGE}.loading.quantized.{place}", what)
        for name, place, what in formats
    ]


@hookimpl
def sagellm_commands() -> list[Command]:
    """Name this package's commands."""
    cli = f"{_PACKAGE}.cli"
    return [
        Command("generate", f"{cli}.generate:app", "Answer prompts, or continue them."),
        Command("chat", f"{cli}.chat.command:app", "Chat with a model."),
        Command("verify", f"{cli}.verify:app", "Compare a model's greedy tokens with transformers'."),
        Command("quantize", f"{cli}.quantize:app", "Write a checkpoint with quantized weights."),
        Command("plugins", f"{cli}.plugins:app", "List installed plugins, describe one, or test it."),
        Command("config", f"{cli}.config:app", "Show the settings and where they come from."),
        Command(
            "doctor", f"{cli}.doctor.command:app", "Say what was found here, and how to fix what is wrong."
        ),
        Command("adapter", f"{cli}.adapter:app", "Run other engines with settings of ours."),
        Command("topology", f"{cli}.topology:app", "Show this machine's CPUs, memory, GPUs and network."),
    ]
