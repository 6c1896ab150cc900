//! GGUF's tensor names to Hugging Face's, by architecture where they mean different
//! things. Unknown names stay, so that a tensor
//! nobody reads is noticed.

/// A tensor's name in Hugging Face's spelling.
pub(super) fn hugging_face(name: &str, architecture: &str) -> String {
    let Some((stem, kind)) = name.rsplit_once('.') else { return name.to_owned() };
    let whole = match stem {
        "token_embd" => Some("model.embed_tokens"),
        "output" => Some("lm_head"),
        "output_norm" => Some("model.norm"),
        _ => None,
    };
    if let Some(whole) = whole {
        return format!("{whole}.{kind}");
    }
    let Some((layer, part)) = stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return name.to_owned();
    };
    let part = match (architecture, part) {
        ("gemma2" | "gemma3", "ffn_norm") => "pre_feedforward_layernorm",
        ("phi3", "ffn_up") => "mlp.gate_up_proj",
        (_, part) => usual(part).unwrap_or_default(),
    };
    if part.is_empty() {
        return name.to_owned();
    }
    format!("model.layers.{layer}.{part}.{kind}")
}

/// A block's part as most architectures mean it.
fn usual(part: &str) -> Option<&'static str> {
    Some(match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        // The same Hugging Face name for two places: no family has both.
        "ffn_norm" | "post_attention_norm" => "post_attention_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    })
}
