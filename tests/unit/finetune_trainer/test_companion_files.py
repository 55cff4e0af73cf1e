"""Which files of a base belong to the model that is made from it."""

from pathlib import Path

from finetune_trainer.companion_files import companion_files

KEPT = [
    "video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "params.json", "LICENSE", "modules.json", "special.tiktoken", "chat.jinja", "generation_config.json", "tokenizer.json",
    "modeling_tiny.py", "merges.txt", "spiece.model",
]  # fmt: skip
STALE = [
    "README.md", "model.gguf", "training_args.bin", "trainer_state.json", "optimizer.pt", "all_results.json", "logo.png",
    "adapter_config.json", "quantize_config.json", "hf_quant_config.json", "other.index.json", "SHA256SUMS", "manifest.json",
    "report.json", "report.html", "verification.json", "verification.md", "provenance.json", "SHA256SUMS.sig", "dump.pkl", "a.so",
    "token", "model.onnx_data", "model.safetensors", "model.safetensors.part", "x.zip", "train.parquet", "log.jsonl",
    "config.json", "config.json.bak", ".gitattributes", ".hidden.json",
]  # fmt: skip


def test_settings_vocabularies_licences_and_code_belong_to_a_model_and_nothing_else(tmp_path: Path) -> None:
    for name in (*KEPT, *STALE):
        (tmp_path / name).write_text("[1, NaN,]")
    (tmp_path / "assets.json").mkdir()
    (tmp_path / "assets.json" / "voice.json").write_text("{}")
    assert [path.name for path in companion_files(tmp_path)] == sorted(KEPT)
