//! Names of tensors: Hugging Face's and CTranslate2's in MLX's.

/// Hugging Face's name (with or without `model.`) in MLX's; `None` for what is not needed.
/// MLX's own names stay.
pub(super) fn from_folder(name: &str) -> Option<String> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    if name.starts_with("proj_out.")
        || name == "encoder.embed_positions.weight"
        || name == "encoder.positional_embedding"
    {
        return None;
    }
    if name == "decoder.embed_positions.weight" {
        return Some("decoder.positional_embedding".into());
    }
    if let Some(rest) = name.strip_prefix("decoder.embed_tokens.") {
        return Some(format!("decoder.token_embedding.{rest}"));
    }
    let name = match name.split_once('.') {
        Some(("encoder", rest)) if rest.starts_with("layer_norm.") => {
            format!("encoder.ln_post.{}", &rest[11..])
        }
        Some(("decoder", rest)) if rest.starts_with("layer_norm.") => format!("decoder.ln.{}", &rest[11..]),
        _ => name.to_owned(),
    };
    let pairs = [
        (".layers.", ".blocks."),
        (".self_attn_layer_norm.", ".attn_ln."),
        (".encoder_attn_layer_norm.", ".cross_attn_ln."),
        (".final_layer_norm.", ".mlp_ln."),
        (".self_attn.", ".attn."),
        (".encoder_attn.", ".cross_attn."),
        (".q_proj.", ".query."),
        (".k_proj.", ".key."),
        (".v_proj.", ".value."),
        (".out_proj.", ".out."),
        (".fc1.", ".mlp1."),
        (".fc2.", ".mlp2."),
        (".mlp.0.", ".mlp1."),
        (".mlp.2.", ".mlp2."),
    ];
    Some(pairs.iter().fold(name, |name, (from, to)| name.replace(from, to)))
}

/// CTranslate2's name in MLX's: the tensors that its rows are, each as many; none for what is not needed.
pub(super) fn from_ctranslate2(name: &str) -> Vec<String> {
    let one = |name: &str| vec![name.to_owned()];
    let parts: Vec<&str> = name.split('/').collect();
    match parts.as_slice() {
        ["encoder", conv @ ("conv1" | "conv2"), leaf] => vec![format!("encoder.{conv}.{leaf}")],
        ["decoder", "embeddings", "weight"] => one("decoder.token_embedding.weight"),
        ["decoder", "position_encodings", "encodings"] => one("decoder.positional_embedding"),
        ["encoder", "layer_norm", leaf] => vec![format!("encoder.ln_post.{}", norm(leaf))],
        ["decoder", "layer_norm", leaf] => vec![format!("decoder.ln.{}", norm(leaf))],
        [part @ ("encoder" | "decoder"), layer, rest @ ..] => match layer.strip_prefix("layer_") {
            Some(layer) => {
                let names = in_layer(rest);
                names.into_iter().map(|name| format!("{part}.blocks.{layer}.{name}")).collect()
            }
            None => Vec::new(),
        },
        _ => Vec::new(),
    }
}

fn norm(leaf: &str) -> &str {
    if leaf == "gamma" { "weight" } else { "bias" }
}

fn in_layer(rest: &[&str]) -> Vec<String> {
    let all = |prefix: &str, names: &[&str], leaf: &str| {
        names.iter().map(|name| format!("{prefix}.{name}.{leaf}")).collect::<Vec<_>>()
    };
    match *rest {
        ["self_attention", "layer_norm", leaf] => vec![format!("attn_ln.{}", norm(leaf))],
        ["self_attention", "linear_0", leaf] => all("attn", &["query", "key", "value"], leaf),
        ["self_attention", "linear_1", leaf] => all("attn", &["out"], leaf),
        ["attention", "layer_norm", leaf] => vec![format!("cross_attn_ln.{}", norm(leaf))],
        ["attention", "linear_0", leaf] => all("cross_attn", &["query"], leaf),
        ["attention", "linear_1", leaf] => all("cross_attn", &["key", "value"], leaf),
        ["attention", "linear_2", leaf] => all("cross_attn", &["out"], leaf),
        ["ffn", "layer_norm", leaf] => vec![format!("mlp_ln.{}", norm(leaf))],
        ["ffn", "linear_0", leaf] => vec![format!("mlp1.{leaf}")],
        ["ffn", "linear_1", leaf] => vec![format!("mlp2.{leaf}")],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_layouts_have_one_name() {
        let folder = |name: &str| from_folder(name).unwrap_or_default();
        assert_eq!(
            folder("model.encoder.layers.3.self_attn.q_proj.bias"),
            "encoder.blocks.3.attn.query.bias"
        );
        assert_eq!(folder("encoder.blocks.3.attn.query.bias"), "encoder.blocks.3.attn.query.bias");
        assert_eq!(
            folder("model.decoder.layers.0.encoder_attn_layer_norm.weight"),
            "decoder.blocks.0.cross_attn_ln.weight"
        );
        assert_eq!(
            folder("model.decoder.layers.0.final_layer_norm.weight"),
            "decoder.blocks.0.mlp_ln.weight"
        );
        assert_eq!(folder("model.encoder.layer_norm.bias"), "encoder.ln_post.bias");
        assert_eq!(folder("decoder.blocks.1.mlp.2.weight"), "decoder.blocks.1.mlp2.weight");
        assert_eq!(folder("model.decoder.embed_tokens.weight"), "decoder.token_embedding.weight");
        assert_eq!(from_folder("proj_out.weight"), None);
        assert_eq!(
            from_ctranslate2("decoder/layer_2/attention/linear_1/weight"),
            ["decoder.blocks.2.cross_attn.key.weight", "decoder.blocks.2.cross_attn.value.weight"]
        );
        assert_eq!(from_ctranslate2("encoder/layer_norm/gamma"), ["encoder.ln_post.weight"]);
        assert!(from_ctranslate2("decoder/num_heads").is_empty());
    }
}
