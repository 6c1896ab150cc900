//! Packets of one track to samples: which decoder, and what to cut off at both ends.

use symphonia::core::codecs::audio::well_known as ids;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_AAC, CODEC_ID_MP3, CODEC_ID_OPUS};
use symphonia::core::codecs::audio::{AudioCodecId, AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::packet::Packet;

use super::edits::Edit;
use super::opus::{self, Opus};

/// Frames cut off at the end of an MP3 that are kept back in case more follows.
const WITHHELD: usize = 3 * 1152;

/// Decoded samples of a packet.
pub(super) struct Block<'a> {
    /// Interleaved.
    pub(super) samples: &'a [f32],
    /// Channels.
    pub(super) channels: u16,
    /// Frames a second.
    pub(super) rate: u32,
}

/// One track's decoder.
pub(super) struct Codec {
    kind: Kind,
    params: AudioCodecParameters,
    samples: Vec<f32>,
    edit: Edit,
    /// Frames in front still to be dropped; not known before the rate is.
    skip: Option<u64>,
    /// Frames still to be given, if there is an end.
    keep: Option<u64>,
    trims_end: bool,
    withheld: Vec<f32>,
}

enum Kind {
    Any(Box<dyn AudioDecoder>),
    Mp3 { decoder: Box<dyn AudioDecoder>, shape: Option<[u8; 3]> },
    Opus(Box<Opus>),
}

impl Codec {
    /// For a track with these parameters. `lame` says whether an MP3's header tells its exact length.
    ///
    /// # Errors
    /// What is not supported or wrong, in words.
    pub(super) fn new(params: &AudioCodecParameters, edit: Edit, lame: bool) -> Result<Self, Failure> {
        let kind = match params.codec {
            CODEC_ID_OPUS => {
                let channels =
                    params.channels.as_ref().and_then(|channels| u16::try_from(channels.count()).ok());
                Kind::Opus(Box::new(
                    Opus::new(params.extra_data.as_deref(), channels).map_err(Failure::Broken)?,
                ))
            }
            CODEC_ID_MP3 => Kind::Mp3 { decoder: make(params)?, shape: None },
            _ => Kind::Any(make(params)?),
        };
        let mp3 = matches!(kind, Kind::Mp3 { .. });
        Ok(Self {
            kind,
            params: params.clone(),
            samples: Vec::new(),
            edit,
            skip: None,
            keep: None,
            trims_end: !mp3 || lame,
            withheld: Vec::new(),
        })
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// Why it could not be decoded; the next one may be.
    pub(super) fn decode(&mut self, packet: &Packet) -> Result<Block<'_>, String> {
        let (channels, rate) = self.decode_whole(packet)?;
        let width = usize::from(channels.max(1));
        self.trim(packet, width);
        let skip = self.skip.get_or_insert_with(|| {
            let edit = (self.edit.skip * f64::from(rate)).round() as u64;
            self.keep = self.edit.keep.map(|seconds| (seconds * f64::from(rate)).round() as u64);
            match &self.kind {
                Kind::Opus(opus) => opus.pre_skip.max(edit),
                _ => edit,
            }
        });
        let frames = self.samples.len() / width;
        let dropped = usize::try_from(*skip).unwrap_or(usize::MAX).min(frames);
        *skip -= dropped as u64;
        let mut kept = frames - dropped;
        if let Some(keep) = &mut self.keep {
            kept = kept.min(usize::try_from(*keep).unwrap_or(usize::MAX));
            *keep -= kept as u64;
        }
        let samples = self.samples.get(dropped * width..(dropped + kept) * width).unwrap_or_default();
        Ok(Block { samples, channels, rate })
    }

    fn decode_whole(&mut self, packet: &Packet) -> Result<(u16, u32), String> {
        let decoder = match &mut self.kind {
            Kind::Opus(opus) => {
                opus.decode(&packet.data, &mut self.samples)?;
                return Ok((opus.channels, opus::RATE));
            }
            Kind::Mp3 { decoder, shape } => {
                // The decoder refuses frames of another rate: joined files need another decoder.
                let now = mp3_shape(&packet.data);
                if now.is_some() && *shape != now {
                    if shape.is_some() {
                        *decoder = make(&self.params).map_err(Failure::into_text)?;
                    }
                    *shape = now;
                }
                decoder
            }
            Kind::Any(decoder) => decoder,
        };
        let buffer = decoder.decode(packet).map_err(|error| error.to_string())?;
        let spec = buffer.spec();
        let channels = u16::try_from(spec.channels().count()).unwrap_or(u16::MAX);
        let rate = spec.rate();
        self.samples.clear();
        buffer.copy_to_vec_interleaved(&mut self.samples);
        Ok((channels, rate))
    }

    /// Cuts off what the container says is the encoder's.
    fn trim(&mut self, packet: &Packet, width: usize) {
        let frames = self.samples.len() / width;
        let cut = |duration: u64| usize::try_from(duration).unwrap_or(usize::MAX);
        match &self.kind {
            // Decoders do it themselves.
            Kind::Any(_) => {}
            // The header has the length in front.
            Kind::Opus(_) => self.samples.truncate(frames.saturating_sub(cut(packet.trim_end.get())) * width),
            Kind::Mp3 { .. } => {
                let end = if self.trims_end { cut(packet.trim_end.get()).min(frames) } else { 0 };
                let start = cut(packet.trim_start.get()).min(frames - end);
                let tail = self.samples.split_off((frames - end) * width);
                self.samples.drain(..start * width);
                self.withheld.extend_from_slice(&tail);
                // More than padding can be: another file follows, or the header is wrong.
                if self.withheld.len() > WITHHELD * width {
                    self.samples.append(&mut self.withheld);
                    self.trims_end = false;
                }
            }
        }
    }
}

/// Why there is no decoder.
pub(super) enum Failure {
    /// There is none for this.
    Unsupported(String),
    /// The parameters make no sense.
    Broken(String),
}

impl Failure {
    /// In words.
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Unsupported(text) | Self::Broken(text) => text,
        }
    }
}

fn make(params: &AudioCodecParameters) -> Result<Box<dyn AudioDecoder>, Failure> {
    // MP3 is cut here: symphonia cuts by lengths that it only guessed.
    let options = AudioDecoderOptions::default().gapless(params.codec != CODEC_ID_MP3);
    symphonia::default::get_codecs().make_audio_decoder(params, &options).map_err(|error| match error {
        Error::Unsupported(_) if params.codec == CODEC_ID_AAC => {
            Failure::Unsupported("HE-AAC or another AAC that is not AAC-LC, mono or stereo,".to_owned())
        }
        Error::Unsupported(_) => Failure::Unsupported(name(params)),
        other => Failure::Broken(other.to_string()),
    })
}

/// The short name of a track's codec.
pub(super) fn name(params: &AudioCodecParameters) -> String {
    let known = symphonia::default::get_codecs().get_audio_decoder(params.codec);
    match (params.codec, known) {
        (CODEC_ID_OPUS, _) => "opus".to_owned(),
        (_, Some(known)) => known.codec.info.short_name.to_owned(),
        (other, None) => {
            let name = UNREAD.iter().find(|(id, _)| *id == other).map(|(_, name)| (*name).to_owned());
            name.unwrap_or_else(|| format!("a codec without a decoder ({other})"))
        }
    }
}

/// Codecs that containers hold and that are not read.
const UNREAD: &[(AudioCodecId, &str)] = &[
    (ids::CODEC_ID_AC3, "AC-3"),
    (ids::CODEC_ID_AC4, "AC-4"),
    (ids::CODEC_ID_ADPCM_G722, "G.722"),
    (ids::CODEC_ID_ADPCM_G726, "G.726"),
    (ids::CODEC_ID_DCA, "DTS"),
    (ids::CODEC_ID_EAC3, "E-AC-3"),
    (ids::CODEC_ID_MP1, "MPEG layer I"),
    (ids::CODEC_ID_MP2, "MPEG layer II"),
    (ids::CODEC_ID_SPEEX, "Speex"),
    (ids::CODEC_ID_TRUEHD, "TrueHD"),
    (ids::CODEC_ID_WAVPACK, "WavPack"),
    (ids::CODEC_ID_WMA, "WMA"),
];

/// Whether there is a decoder for a track.
pub(super) fn is_known(params: &AudioCodecParameters) -> bool {
    params.codec == CODEC_ID_OPUS
        || symphonia::default::get_codecs().get_audio_decoder(params.codec).is_some()
}

/// Version and layer, rate, mono or not: what must not change within a stream of MP3 frames.
fn mp3_shape(frame: &[u8]) -> Option<[u8; 3]> {
    let mono = u8::from(frame.get(3)? & 0xc0 == 0xc0);
    Some([frame.get(1)? & 0x1e, frame.get(2)? & 0x0c, mono])
}
