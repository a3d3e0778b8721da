"""Settings of small models for architectures that equal names and sizes do not make small, for the sweep."""

from __future__ import annotations

from typing import Any

from support import tiny

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}

_DELTA_TEXT: dict[str, Any] = {**tiny._SMALL, **tiny._DELTA, "vocab_size": 800}

_INDEXED_WINDOWS: dict[str, Any] = {
    **tiny._SMALL,
    **tiny._EXPERTS,
    **tiny._LATENT,
    **tiny._INDEXER,
    "index_n_heads": 16,
    "vocab_size": 800,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "sliding_window": 32,
    "shared_experts_intermediate_size": 32,
    "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 24,
    "per_layer_config": {},
}

_INKLING: dict[str, Any] = {
    "unpadded_vocab_size": 800,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 32,
    "rel_extent": 64,
    "d_rel": 8,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "n_layers_per_attn_res_block": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

_QWEN4: dict[str, Any] = {
    **_DELTA_TEXT,
    **tiny._EXPERTS,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 500,
    "split_ngram_parts": 4,
}

_SMALL_BYTES: dict[str, Any] = {
    "vocab_size": 800,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}

_CODES: dict[str, Any] = {
    "decoder": {
        "vocab_size": 800,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "ffn_dim": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
}

SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **tiny._EXPERTS,
        **tiny._LATENT,
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "blt": {
        "vocab_size": 800,
        "patch_in_forward": False,
        "encoder_hash_byte_group_size": [2, 3],
        "encoder_hash_byte_group_vocab": 500,
        "patcher_config": _SMALL_BYTES,
        "encoder_config": {**_SMALL_BYTES, "hidden_size_global": 64},
        "decoder_config": {**_SMALL_BYTES, "hidden_size_global": 64},
        "global_config": {**_SMALL_BYTES, "hidden_size": 64},
    },
    "blenderbot": {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_layers": 3, "encoder_layers": 3},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {
        **tiny._EXPERTS,
        "n_shared_experts": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots3_note_text": _INDEXED_WINDOWS,
    "dots3_note": {
        "text_config": {**_INDEXED_WINDOWS, "model_type": "dots3_note_text"},
        "vision_config": {**_VISION, "adapter_in_dim": 32, "adapter_out_dim": 64, "per_layer_config": {}},
        "audio_config": {
            "hidden_size": 32,
            "adapter_input_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "adapter_out_dim": 64,
            "downsample_hidden_size": 16,
        },
    },
    "gemma3": {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    "gemma4_assistant": {
        "backbone_hidden_size": 64,
        "text_config": {
            **tiny._SMALL,
            "model_type": "gemma4_text",
            "vocab_size": 800,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 32,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
        },
    },
    "git": {"vision_config": _VISION, "is_decoder": True},
    "got_ocr2": {"vision_config": {**_VISION, "output_channels": 16, "mlp_dim": 48, "global_attn_indexes": [0]}},
    "gpt_neo": {"num_heads": 4, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 32},
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {
        **_INKLING,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "longcat_flash": {
        **tiny._LATENT,
        "num_layers": 2,
        "num_attention_heads": 4,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
    },
    "phi4_multimodal": {
        "vision_config": {**_VISION, "crop_size": 32},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen3_5": {"text_config": {**_DELTA_TEXT, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "text_config": {
            **_DELTA_TEXT,
            **tiny._EXPERTS,
            "shared_expert_intermediate_size": 32,
            "model_type": "qwen3_5_moe_text",
        }
    },
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": {**_QWEN4, "model_type": "qwen4_exp_text"}},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "max_position_embeddings": 256,
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh", "local"],
    },
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xlstm": {"qk_dim_factor": 1.0, "embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "num_hidden_layers": 2},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 32,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "router_hidden_size": 16,
    },
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "moss_transcribe_diarize": {
        "audio_config": {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "hidden_size": 32,
            "max_source_positions": 64,
        }
    },
}
"""Over the sizes that all have."""

_ENCODERS_TOO = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Encoders that their configuration makes decoders; as encoders they keep no cache, and are refused."""

_DECODERS_OF_TWO = (
    "bart", "bigbird_pegasus", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet",
)  # fmt: skip
"""Decoders of encoder-decoder models; their caches are as deep as the encoder."""

for _name in _ENCODERS_TOO:
    SPECIAL[_name] = {**SPECIAL.get(_name, {}), "is_decoder": True}
for _name in _DECODERS_OF_TWO:
    SPECIAL[_name] = {**SPECIAL.get(_name, {}), "encoder_layers": 3, "num_encoder_layers": 3}
SPECIAL["xmod"] |= {"default_language": "en_XX"}

PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Model types whose causal language model is made of a part of their configuration."""
