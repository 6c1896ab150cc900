//! What the offered tools' schemas say: their names, and which types their parameters take.

use std::collections::HashMap;

use serde_json::Value;

/// References followed from one schema to the next.
const MAX_REFERENCES: usize = 8;

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Each tool's parameters, as a JSON schema.
    schemas: HashMap<String, Value>,
}

/// The types a parameter takes; none known: anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Types {
    /// A text.
    pub string: bool,
    /// Null.
    pub null: bool,
    /// True and false.
    pub boolean: bool,
    /// Numbers, lists, objects.
    pub other: bool,
}

impl Types {
    /// Nothing but texts.
    pub const STRING: Self = Self { string: true, null: false, boolean: false, other: false };
    /// Anything but texts.
    pub const VALUE: Self = Self { string: false, null: true, boolean: true, other: true };

    /// Whether nothing is known.
    fn is_unknown(self) -> bool {
        self == Self::default()
    }

    /// Whether the word may stand for null.
    pub fn takes_null(self) -> bool {
        self.null || self.is_unknown()
    }

    /// Whether the words may stand for true and false.
    pub fn takes_boolean(self) -> bool {
        self.boolean || self.is_unknown()
    }

    fn add(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "null" => self.null = true,
            "boolean" => self.boolean = true,
            _ => self.other = true,
        }
    }

    fn add_value(&mut self, value: &Value) {
        self.add(match value {
            Value::String(_) => "string",
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            _ => "object",
        });
    }
}

impl Tools {
    /// From definitions in OpenAI's shape, nested or flat, or in Anthropic's.
    pub fn new(definitions: &[Value]) -> Self {
        let schemas = definitions.iter().filter_map(|definition| {
            let function = definition.get("function").unwrap_or(definition);
            let name = function.get("name")?.as_str()?.to_owned();
            let schema = function.get("parameters").or_else(|| function.get("input_schema"));
            Some((name, schema.cloned().unwrap_or_default()))
        });
        Self { schemas: schemas.collect() }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.schemas.is_empty()
    }

    /// Whether a tool has this name.
    pub fn declares(&self, name: &str) -> bool {
        self.schemas.contains_key(name)
    }

    /// The types of a tool's parameter.
    pub fn types(&self, tool: &str, parameter: &str) -> Types {
        let mut types = Types::default();
        if let Some(root) = self.schemas.get(tool)
            && let Some(schema) = root.get("properties").and_then(|properties| properties.get(parameter))
        {
            collect(root, schema, MAX_REFERENCES, &mut types);
        }
        types
    }
}

/// Adds what a schema takes, its alternatives and references included.
fn collect(root: &Value, schema: &Value, depth: usize, types: &mut Types) {
    let Some(depth) = depth.checked_sub(1) else { return };
    match schema.get("type") {
        Some(Value::String(name)) => types.add(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).for_each(|name| types.add(name)),
        _ => {
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            values.chain(schema.get("const")).for_each(|value| types.add_value(value));
        }
    }
    let alternatives = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
    alternatives.flatten().for_each(|schema| collect(root, schema, depth, types));
    let pointer = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
    if let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) {
        collect(root, target, depth, types);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_come_from_types_alternatives_values_and_references() {
        let parameters = json!({
            "properties": {
                "plain": {"type": "string"},
                "listed": {"type": ["string", "null"]},
                "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "named": {"enum": ["a", "b"]},
                "far": {"$ref": "#/$defs/Unit"},
                "round": {"$ref": "#/properties/round"},
                "number": {"type": "integer"},
                "free": {"description": "?"},
            },
            "$defs": {"Unit": {"type": "string"}},
        });
        let tools = Tools::new(&[
            json!({"type": "function", "function": {"name": "f", "parameters": parameters}}),
            json!({"name": "g", "input_schema": {"properties": {"x": {"type": "boolean"}}}}),
        ]);
        let nullable = Types { null: true, ..Types::STRING };
        assert_eq!(tools.types("f", "plain"), Types::STRING);
        assert_eq!(tools.types("f", "listed"), nullable);
        assert_eq!(tools.types("f", "any"), nullable);
        assert_eq!(tools.types("f", "named"), Types::STRING);
        assert_eq!(tools.types("f", "far"), Types::STRING);
        assert_eq!(tools.types("f", "number"), Types { other: true, ..Types::default() });
        assert_eq!(tools.types("g", "x"), Types { boolean: true, ..Types::default() });
        for unknown in ["round", "free", "missing"] {
            assert_eq!(tools.types("f", unknown), Types::default(), "{unknown}");
        }
        assert!(tools.declares("g") && !tools.declares("h"));
    }
}
