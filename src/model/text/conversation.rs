//! A request as a template sees it, and made harmless for it.

use serde_json::{Map, Value, json};

use crate::model::template::{Capabilities, TemplateInput, as_parts, python_json};
use crate::model::tokenizer::Controls;
use crate::types::{ChatMessage, PrepareError, ToolCall};

/// Noncharacters: never text, and kept by every filter of a template.
const SENTINELS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// Messages with the keys that templates know, in the form in which the template prints them;
/// absent things have no key, except an assistant's missing `content`.
pub(super) fn messages(messages: &[ChatMessage], can: &Capabilities) -> Result<Value, PrepareError> {
    messages.iter().map(|each| message(each, can)).collect()
}

fn message(message: &ChatMessage, can: &Capabilities) -> Result<Value, PrepareError> {
    let mut map = Map::new();
    map.insert("role".into(), message.role.as_str().into());
    let missing = if can.null_content { Value::Null } else { "".into() };
    let calls = !message.tool_calls.is_empty();
    // A content without text beside a call is none at all where the template would lose the call.
    let given =
        message.content.as_ref().filter(|text| !(calls && !can.empty_content && text.trim().is_empty()));
    map.insert("content".into(), given.map_or(missing, |text| text.clone().into()));
    if let Some(reasoning) = &message.reasoning {
        map.insert("reasoning_content".into(), reasoning.clone().into());
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|each| call(each, can));
        let calls: Vec<Value> = calls.collect::<Result<_, _>>()?;
        map.insert("tool_calls".into(), calls.into());
    }
    if let Some(id) = &message.tool_call_id {
        map.insert("tool_call_id".into(), id.clone().into());
    }
    if let Some(name) = &message.name {
        map.insert("name".into(), name.clone().into());
    }
    let mut message = Value::Object(map);
    if can.content_parts {
        as_parts(&mut message);
    }
    Ok(message)
}

fn call(call: &ToolCall, can: &Capabilities) -> Result<Value, PrepareError> {
    let mut map = Map::new();
    if let Some(id) = &call.id {
        map.insert("id".into(), id.clone().into());
    }
    map.insert("type".into(), "function".into());
    let arguments = match &call.arguments {
        Value::String(_) => call.arguments.clone(),
        arguments if can.string_arguments => python_json(arguments)?.into(),
        arguments => arguments.clone(),
    };
    map.insert("function".into(), json!({"name": call.name, "arguments": arguments}));
    Ok(Value::Object(map))
}

/// Tool definitions, or null where there are none.
pub(super) fn tools(tools: &[Value]) -> Value {
    if tools.is_empty() { Value::Null } else { tools.to_vec().into() }
}

/// Breaks what looks like a control token in every string of the request. Gives the
/// sentinel if one was needed.
pub(super) fn disarm(
    input: &mut TemplateInput,
    controls: &Controls,
    template: &str,
) -> Result<Option<char>, PrepareError> {
    let mut needed = false;
    let mut free: Vec<char> = SENTINELS.filter(|&mark| !template.contains(mark)).collect();
    each_string(input, &mut |text| {
        needed |= controls.must_break(text);
        if text.chars().any(|c| SENTINELS.contains(&c)) {
            free.retain(|&mark| !text.contains(mark));
        }
    });
    if !needed {
        return Ok(None);
    }
    let Some(&sentinel) = free.first() else {
        return Err(PrepareError::Field {
            field: "messages".into(),
            message: "holds every noncharacter from U+FDD0 to U+FDEF; leave one out".into(),
        });
    };
    each_string(input, &mut |text| {
        if let std::borrow::Cow::Owned(broken) = controls.break_in(text, sentinel) {
            *text = broken;
        }
    });
    Ok(Some(sentinel))
}

/// Visits every string that came with the request. Roles are ours and left alone.
fn each_string(input: &mut TemplateInput, visit: &mut impl FnMut(&mut String)) {
    for message in input.messages.as_array_mut().into_iter().flatten() {
        for (key, value) in message.as_object_mut().into_iter().flatten() {
            if key != "role" {
                strings(value, visit);
            }
        }
    }
    strings(&mut input.tools, visit);
    for value in input.variables.values_mut() {
        strings(value, visit);
    }
}

fn strings(value: &mut Value, visit: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter_mut().for_each(|item| strings(item, visit)),
        Value::Object(map) => {
            let old = std::mem::take(map);
            for (mut key, mut item) in old {
                visit(&mut key);
                strings(&mut item, visit);
                map.insert(key, item);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
