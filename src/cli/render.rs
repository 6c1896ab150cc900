//! `greenroom render`: prints what a chat template makes of given variables, for those who debug one.
//!
//! Exactly that, byte for byte: nothing is rearranged as the server does, and no line break is added.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use greenroom::model::template::{ChatTemplate, TemplateInput};
use greenroom::types::PrepareError;
use serde_json::{Map, Value};

use super::{RenderArgs, Stop};
use crate::exit::Exit;

/// Prints the text, or fails with the template's message.
pub(super) fn render(args: &RenderArgs) -> Result<Exit, Stop> {
    let source = text_of(&args.template)?;
    let input = variables(&args.variables)?;
    let now = match &args.now {
        Some(text) => moment(text).ok_or_else(|| {
            let message = format!("--now {text}: give UTC as 2026-01-15 or 2026-01-15T12:34:56Z");
            Stop::new(Exit::Usage, message)
        })?,
        None => SystemTime::now(),
    };
    let mut special = Map::new();
    for (name, text) in [("bos_token", &args.bos), ("eos_token", &args.eos)] {
        special.insert(name.into(), text.clone().unwrap_or_default().into());
    }
    let template = ChatTemplate::compile(source, special)
        .map_err(|message| failed(format!("{}: {message}", args.template.display())))?;
    let text = template.render(&input, now).map_err(|error| match error {
        PrepareError::Template { message } => failed(message),
        other => failed(other.to_string()),
    })?;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| failed(format!("cannot write the text: {error}")))?;
    Ok(Exit::Ok)
}

fn failed(message: String) -> Stop {
    Stop::new(Exit::Failure, message)
}

fn text_of(path: &Path) -> Result<String, Stop> {
    let bytes = std::fs::read(path).map_err(|error| failed(format!("{}: {error}", path.display())))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        failed(format!("{}: is not UTF-8 at byte {at}", path.display()))
    })
}

/// The variables file: messages, tools, add_generation_prompt and whatever else the template knows.
fn variables(path: &Path) -> Result<TemplateInput, Stop> {
    let wrong = |message: &str| failed(format!("{}: {message}", path.display()));
    let text = text_of(path)?;
    // The error's text ends with line and column.
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(&error.to_string()))?;
    let Value::Object(mut variables) = json else {
        return Err(wrong(
            "must be an object such as {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}",
        ));
    };
    let mut take = |name: &str| variables.shift_remove(name).unwrap_or(Value::Null);
    let (messages, tools) = (take("messages"), take("tools"));
    let add_generation_prompt = match take("add_generation_prompt") {
        Value::Null => false,
        Value::Bool(flag) => flag,
        _ => return Err(wrong("`add_generation_prompt` must be true or false")),
    };
    Ok(TemplateInput { messages, tools, add_generation_prompt, variables })
}

/// A date, perhaps with a time, in UTC.
fn moment(text: &str) -> Option<SystemTime> {
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "0:0:0"));
    let numbers = |text: &str, separator: char| -> Option<Vec<u64>> {
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit()) && part.len() <= 4;
        text.split(separator).map(|part| digits(part).then(|| part.parse().ok()).flatten()).collect()
    };
    let date = numbers(date, '-')?;
    let time = numbers(time.strip_suffix('Z').unwrap_or(time), ':')?;
    let &[year, month, day] = date.as_slice() else { return None };
    let (hour, minute, second) = match *time.as_slice() {
        [hour, minute] => (hour, minute, 0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let lengths = [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = *lengths.get(usize::try_from(month.checked_sub(1)?).ok()?)?;
    if year < 1970 || day == 0 || day > length || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let before: u64 = lengths.iter().take(month as usize - 1).sum();
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    let days = (year - 1970) * 365 + leaps(year - 1) - leaps(1969) + before + day - 1;
    Some(UNIX_EPOCH + Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60 + second))
}
