"""Train a SPLADE model by LoRA, of a masked model such as BERT or a decoder such as Qwen3.

python examples/lora.py Qwen/Qwen3-0.6B
python examples/lora.py google-bert/bert-base-uncased
"""

import sys

import data
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from sparse_losses import InfoNCELoss, SpladeEncoder, calibrate

MASKED = {"target_modules": ["query", "key", "value"]}
DECODER = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def load(model: str) -> SpladeEncoder:
    """An encoder whose layers have adapters, and learn nothing else."""
    is_decoder = "CausalLM" in AutoConfig.from_pretrained(model).architectures[0]
    kind = AutoModelForCausalLM if is_decoder else AutoModelForMaskedLM
    base = kind.from_pretrained(model)
    adapters = LoraConfig(r=16, lora_alpha=32, **(DECODER if is_decoder else MASKED))
    options = {"max_length": 128}
    if is_decoder:  # its logits are large at first, and its first token may win every maximum
        scale = base.config.hidden_size**-0.25
        options |= {"logit_scale": scale, "pool_special_tokens": False}
    tokenizer = AutoTokenizer.from_pretrained(model)
    return SpladeEncoder(get_peft_model(base, adapters), tokenizer, **options)


def main(
    model: str = "Qwen/Qwen3-0.6B", steps: int = 100, folder: str = "my-adapters"
) -> SpladeEncoder:
    train, held_out = data.pairs()  # yours: (query, document)
    encoder = load(model)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    learned = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    print(f"{sum(map(torch.numel, learned)):,} parameters learn")

    info_nce = InfoNCELoss(temperature=0.05)  # cosines: a decoder starts dense
    optimizer = torch.optim.AdamW(learned, lr=1e-4)  # adapters start at 0
    encoder.train()
    for queries, documents in data.batches(train, 16, steps):
        loss = info_nce(
            encoder(**encoder.tokenize(queries)), encoder(**encoder.tokenize(documents))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder.eval()

    queries, documents = map(list, zip(*held_out, strict=True))
    calibrate(encoder, documents, 64, queries=queries, query_target=8)
    print(f"Recall@10: {data.recall(encoder, held_out):.3f}")
    encoder.save_pretrained(folder)  # the adapters, and the name of the model
    return SpladeEncoder.from_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
