//! Which cross-attention heads follow the audio's time, by model.

use serde_json::Value;

use super::{WhisperDims, WhisperTensors};

type Known = ([usize; 5], &'static [(usize, usize)]);

/// Published heads, as (layer, head), by the sizes that tell the models apart: width, encoder layers, decoder
/// layers, vocabulary, mel bins. The two sets of large-v1 and v2 cannot be told apart by sizes: v2's.
const KNOWN: &[Known] = &[
    ([384, 4, 4, 51_864, 80], &[(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]),
    ([384, 4, 4, 51_865, 80], &[(2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)]),
    ([512, 6, 6, 51_864, 80], &[(3, 3), (4, 7), (5, 1), (5, 5), (5, 7)]),
    ([512, 6, 6, 51_865, 80], &[(3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)]),
    (
        [768, 12, 12, 51_864, 80],
        &[
            (6, 6),
            (7, 0),
            (7, 3),
            (7, 8),
            (8, 2),
            (8, 5),
            (8, 7),
            (9, 0),
            (9, 4),
            (9, 8),
            (9, 10),
            (10, 0),
            (10, 1),
            (10, 2),
            (10, 3),
            (10, 6),
            (10, 11),
            (11, 2),
            (11, 4),
        ],
    ),
    (
        [768, 12, 12, 51_865, 80],
        &[(5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)],
    ),
    (
        [1024, 24, 24, 51_864, 80],
        &[
            (11, 4),
            (14, 1),
            (14, 12),
            (14, 14),
            (15, 4),
            (16, 0),
            (16, 4),
            (16, 9),
            (17, 12),
            (17, 14),
            (18, 7),
            (18, 10),
            (18, 15),
            (20, 0),
            (20, 3),
            (20, 9),
            (20, 14),
            (21, 12),
        ],
    ),
    ([1024, 24, 24, 51_865, 80], &[(13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)]),
    (
        [1280, 32, 32, 51_865, 80],
        &[
            (10, 12),
            (13, 17),
            (16, 11),
            (16, 12),
            (16, 13),
            (17, 15),
            (17, 16),
            (18, 4),
            (18, 11),
            (18, 19),
            (19, 11),
            (21, 2),
            (21, 3),
            (22, 3),
            (22, 9),
            (22, 12),
            (23, 5),
            (23, 7),
            (23, 13),
            (25, 5),
            (26, 1),
            (26, 12),
            (27, 15),
        ],
    ),
    (
        [1280, 32, 32, 51_866, 128],
        &[(7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6)],
    ),
    ([1280, 32, 4, 51_866, 128], &[(2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)]),
];

/// What the files say, unless it is out of range or the usual stand-in where better is known; else what is
/// known of a model of these sizes; else all heads of the decoder's second half.
pub(super) fn heads(dims: &WhisperDims, tensors: &WhisperTensors, configs: &[&Value]) -> Vec<(usize, usize)> {
    let half = dims.decoder_layers / 2..dims.decoder_layers;
    let stand_in: Vec<_> = half.flat_map(|layer| (0..dims.heads).map(move |head| (layer, head))).collect();
    let sizes = [dims.width, dims.encoder_layers, dims.decoder_layers, dims.vocabulary, dims.mels];
    let known = KNOWN.iter().find(|(of, _)| *of == sizes).map(|(_, heads)| heads.to_vec());
    let told = tensors.alignment().map(<[_]>::to_vec);
    let told = told.or_else(|| configs.iter().find_map(|config| listed(config)));
    let fits = |heads: &Vec<(usize, usize)>| {
        let inside = |&(layer, head): &(usize, usize)| layer < dims.decoder_layers && head < dims.heads;
        !heads.is_empty() && heads.iter().all(inside)
    };
    if told.as_ref().is_some_and(|heads| !fits(heads)) {
        tracing::warn!("the model's alignment heads are those of another model; they are not used");
    }
    let told = told.filter(fits).filter(|heads| known.is_none() || *heads != stand_in);
    told.or(known).unwrap_or(stand_in)
}

fn listed(config: &Value) -> Option<Vec<(usize, usize)>> {
    let pairs = config.get("alignment_heads")?.as_array()?.iter();
    let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
    pairs.map(|pair| Some((number(pair.get(0)?)?, number(pair.get(1)?)?))).collect()
}
