//! `greenroom inspect`: what a model is made of.

use std::fmt::Write;

use greenroom::model::inspect::{Details, Inspection, inspect as look};
use greenroom::types::ByteSize;

use super::models::shown;
use super::{InspectArgs, Stop, home, settings, terminal};
use crate::exit::Exit;

/// Control tokens shown without `--json`.
const SHOWN_SPECIALS: usize = 24;
/// Tensors outside layers, and of the first layer, are shown without `--tensors`.
const FIRST_LAYER: &str = ".layers.0.";

/// Prints the description; the exit code says whether the model could be loaded.
pub(super) fn inspect(args: &InspectArgs) -> Result<Exit, Stop> {
    let config = settings::plain(args.settings.config.as_deref())?;
    let found = home::here(args.model.as_deref(), &config)?;
    let model = look(&found.path, &config);
    if args.template {
        return template(&model);
    }
    let text = if args.json {
        let text = serde_json::to_string_pretty(&model);
        text.map_err(|error| Stop::new(Exit::Failure, error.to_string()))? + "\n"
    } else {
        described(&model, args.tensors)
    };
    let _ = terminal::say(&text);
    Ok(if model.problem.is_none() { Exit::Ok } else { Exit::Config })
}

fn template(model: &Inspection) -> Result<Exit, Stop> {
    let Some(details) = &model.details else {
        return Err(Stop::new(Exit::Config, model.problem.clone().unwrap_or_default()));
    };
    match &details.template {
        Some(template) => {
            let _ = terminal::say(template);
            Ok(Exit::Ok)
        }
        None => Err(Stop::new(Exit::Config, "the model has no chat template: it is a base model")),
    }
}

fn described(model: &Inspection, all_tensors: bool) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "{name:<12} {}", shown(value));
    };
    line("path", &model.path.display().to_string());
    line("format", model.format.unwrap_or("neither GGUF nor a model folder"));
    line("family", model.family.as_deref().unwrap_or("unknown"));
    line("size", &ByteSize(model.file_bytes).to_string());
    if let Some(problem) = &model.problem {
        line("problem", problem);
    }
    let Some(details) = &model.details else { return out };
    line("parameters", &details.parameters.to_string());
    line("context", &format!("{} tokens", details.context));
    for (key, value) in &details.sizes {
        line("", &format!("{key} {value}"));
    }
    memory(details, &mut line);
    match &details.template {
        Some(template) => line("template", &format!("{} bytes (--template prints it)", template.len())),
        None => line("template", "none: a base model"),
    }
    line("vocabulary", &format!("{} tokens", details.vocabulary));
    let token = |(id, text): &(u32, String)| format!("{id} {text}");
    line("begins", &details.bos.as_ref().map_or_else(|| "with nothing".to_owned(), token));
    line("ends", &details.ends.iter().map(token).collect::<Vec<_>>().join(", "));
    let specials: Vec<String> = details.special.iter().take(SHOWN_SPECIALS).map(token).collect();
    let more = details.special.len().saturating_sub(SHOWN_SPECIALS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    line("special", &format!("{}{more}", specials.join(", ")));
    for (kind, (count, bytes)) in &details.types {
        line("type", &format!("{kind}: {count} tensors, {}", ByteSize(*bytes)));
    }
    for tensor in &details.tensors {
        let is_first = tensor.name.contains(FIRST_LAYER) || !tensor.name.contains(".layers.");
        if all_tensors || is_first {
            let shape = format!("{:?}", tensor.shape);
            line(
                "tensor",
                &format!("{:<48} {shape:<16} {:<6} {}", tensor.name, tensor.kind, ByteSize(tensor.bytes)),
            );
        }
    }
    if !all_tensors {
        line("", "(further layers likewise; --tensors shows all)");
    }
    out
}

fn memory(details: &Details, line: &mut impl FnMut(&str, &str)) {
    let memory = &details.memory;
    let limit = memory.limit.map_or_else(|| "unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
    let verdict = match (memory.fits, memory.fitting_context) {
        (true, _) => "fits".to_owned(),
        (false, Some(tokens)) => format!("fits with a context of {tokens} tokens"),
        (false, None) => "does not fit".to_owned(),
    };
    line(
        "memory",
        &format!(
            "{} = {} weights + {} keys and values ({} a token) + {} for computing; {limit} may be used: {verdict}",
            ByteSize(memory.total),
            ByteSize(memory.weights),
            ByteSize(memory.kv),
            ByteSize(memory.kv_per_token),
            ByteSize(memory.scratch)
        ),
    );
}
