//! Which format each published template asks for.

use greenroom::model::output::OutputFormat;
use greenroom::model::template::ChatTemplate;

use super::common::{data, json};

/// Template, its calls, its thoughts.
const EXPECTED: &[(&str, &str, &str)] = &[
    ("ByteDance-Seed-OSS", "seed", "seed"),
    ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "command", "command"),
    ("GLM-4.7-Flash", "glm", "think"),
    ("GigaChat3-10B-A1.8B", "gigachat", "think"),
    ("Kimi-K2-Instruct", "kimi", "think"),
    ("Kimi-K2-Thinking", "kimi", "think"),
    ("LFM2-8B-A1B", "lfm", "think"),
    ("LFM2.5-Instruct", "lfm", "think"),
    // Tags named after parameters: not read, so calls are text.
    ("MiniMax-M3", "bare", "minimax"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "think"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen-xml", "think"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", "think"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "think"),
    ("Qwen-Qwen2.5-7B-Instruct", "hermes", "think"),
    ("Qwen-Qwen3-0.6B", "hermes", "think"),
    ("Qwen3-Coder", "qwen-xml", "think"),
    ("Qwen3.5-4B", "qwen-xml", "think"),
    ("Reka-Edge", "hermes", "think"),
    ("SmolLM2-135M-Instruct-gguf", "bare", "think"),
    ("Spark2.5", "glm", "think"),
    ("StepFun3.5-Flash", "qwen-xml", "think"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek", "think"),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek", "think"),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek", "think"),
    ("deepseek-ai-DeepSeek-V3.2", "dsml", "think"),
    ("deepseek-ai-DeepSeek-V4", "dsml", "think"),
    ("fireworks-ai-llama-3-firefunction-v2", "functools", "think"),
    ("google-gemma-2-2b-it", "bare", "think"),
    ("google-gemma-4-31B-it", "gemma4", "gemma"),
    ("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite"),
    ("ibm-granite-granite-4.0", "hermes", "think"),
    ("ibm-granite-granite-4.1", "hermes", "think"),
    ("inclusionai-ling-3.0-flash", "glm", "think"),
    ("lenml-deepseek_v3", "deepseek", "think"),
    ("lenml-gemma3", "bare", "think"),
    ("lenml-llama3", "bare", "think"),
    ("lenml-llama3_1", "bare", "think"),
    ("lenml-qwen3", "hermes", "think"),
    ("llama-cpp-deepseek-r1", "deepseek", "think"),
    ("llama-cpp-rwkv-world", "bare", "think"),
    ("meetkai-functionary-medium-v3.1", "functionary", "think"),
    // A name on a line of its own, without a marker: not read.
    ("meetkai-functionary-medium-v3.2", "bare", "think"),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama", "think"),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama", "think"),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama", "think"),
    ("microsoft-Phi-3.5-mini-instruct", "bare", "think"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "magistral"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "think"),
    ("muse-glimmer", "atem", "think"),
    ("openai-gpt-oss-120b", "harmony", "think"),
    ("openbmb-MiniCPM5-1B", "minicpm", "think"),
    ("poolside-Laguna-S-2.1", "glm", "think"),
    ("poolside-Laguna-XS-2.1", "glm", "think"),
    ("poolside-Laguna-XS.2", "glm", "think"),
    ("unsloth-Apriel-1.5", "apriel", "apriel"),
    ("unsloth-mistral-Devstral-Small-2507", "mistral", "think"),
    ("upstage-Solar-Open-100B", "solar", "solar"),
];

fn detect(name: &str) -> OutputFormat {
    let golden = json(&format!("chat-templates/golden/{name}.json"));
    let source = std::fs::read_to_string(data(&format!("chat-templates/{name}.jinja"))).expect("a template");
    let special = golden["special_tokens"].as_object().expect("special tokens").clone();
    OutputFormat::detect(&ChatTemplate::compile(source, special).expect("compiles"))
}

#[test]
fn each_published_template_has_its_format() {
    let mut names: Vec<String> = std::fs::read_dir(data("chat-templates"))
        .expect("a folder")
        .filter_map(|entry| {
            entry.expect("an entry").file_name().to_str()?.strip_suffix(".jinja").map(str::to_owned)
        })
        .collect();
    names.sort();
    let found: Vec<(&str, &str, &str)> = names
        .iter()
        .map(|name| {
            let format = detect(name);
            (name.as_str(), format.calls.name, format.thought.name)
        })
        .collect();
    let wrong: Vec<_> = found.iter().filter(|row| !EXPECTED.contains(row)).collect();
    assert!(wrong.is_empty() && found.len() == EXPECTED.len(), "{wrong:#?}");
}

/// What a template renders for calls is what its format reads.
#[test]
fn what_templates_render_is_read_back() {
    use super::parts::{Part, parser, read};
    let mut read_back = 0;
    for (name, calls, _) in EXPECTED {
        let golden = json(&format!("chat-templates/golden/{name}.json"));
        let case = &golden["results"]["tool_call_and_result"]["ok"];
        let Some(behind) = case.as_str().and_then(|text| text.rsplit_once("What is the weather in Zürich?"))
        else {
            continue;
        };
        // The assistant's turn, up to the tool's.
        let turn = behind.1.split("21.5").next().expect("a turn");
        let format = detect(name);
        // A bare call begins its turn, and messages their head.
        let begin = match format.calls.name {
            "llama" => turn.find("{\"name\""),
            "harmony" => turn.find(" to="),
            _ => Some(0),
        };
        let turn = &turn[begin.unwrap_or(0)..];
        let parts = read(parser(&format, false), [turn]);
        let read: Vec<_> = parts
            .iter()
            .filter_map(|part| match part {
                Part::Call { name, arguments, .. } => {
                    Some((name.as_str(), serde_json::from_str::<serde_json::Value>(arguments).expect("JSON")))
                }
                _ => None,
            })
            .collect();
        let expected = [("get_weather", serde_json::json!({"city": "Zürich", "unit": "celsius"}))];
        if turn.contains("get_weather") && *calls != "bare" {
            assert_eq!(read, expected, "{name}: {turn}");
            read_back += 1;
        }
    }
    assert_eq!(read_back, 39);
}
