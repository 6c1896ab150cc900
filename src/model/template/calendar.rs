//! `strftime` in UTC, for the templates that print today's date.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment in the proleptic Gregorian calendar.
struct Moment {
    year: i64,
    /// 0 = January.
    month: usize,
    /// From 1.
    day: i64,
    /// 0 = Sunday.
    weekday: usize,
    /// From 1.
    day_of_year: i64,
    /// Since midnight.
    seconds: i64,
}

impl Moment {
    fn of(now: SystemTime) -> Self {
        let since = match now.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_secs().min(1 << 40) as i64,
            Err(before) => -(before.duration().as_secs().min(1 << 40) as i64),
        };
        let (days, seconds) = (since.div_euclid(86_400), since.rem_euclid(86_400));
        // Eras of 400 years that begin on the first of March, so that leap days come last.
        let shifted = days + 719_468;
        let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let day_of_march_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * march_month + 2) / 5 + 1;
        let month = (march_month + 2) % 12;
        let year = era * 400 + year_of_era + i64::from(month < 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let day_of_year = before[month as usize] + day + i64::from(leap && month > 1);
        let weekday = (days + 4).rem_euclid(7) as usize;
        Self { year, month: month as usize, day, weekday, day_of_year, seconds }
    }
}

/// Formats a moment. A directive that is not known is printed as it stands.
pub(super) fn strftime(now: SystemTime, format: &str) -> String {
    let moment = Moment::of(now);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // GNU's flag: no padding.
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        directed(&mut out, &moment, directive, padded);
    }
    out
}

fn directed(out: &mut String, moment: &Moment, directive: Option<char>, padded: bool) {
    let mut number = |value: i64, width: usize| {
        let width = if padded { width } else { 0 };
        let _ = write!(out, "{value:0width$}");
    };
    let hour = moment.seconds / 3600;
    let hour12 = (hour + 11) % 12 + 1;
    match directive {
        Some('Y') => number(moment.year, 4),
        Some('y') => number(moment.year.rem_euclid(100), 2),
        Some('m') => number(moment.month as i64 + 1, 2),
        Some('d') => number(moment.day, 2),
        Some('j') => number(moment.day_of_year, 3),
        Some('H') => number(hour, 2),
        Some('I') => number(hour12, 2),
        Some('M') => number(moment.seconds / 60 % 60, 2),
        Some('S') => number(moment.seconds % 60, 2),
        Some('e') if padded => {
            let _ = write!(out, "{:>2}", moment.day);
        }
        Some('e') => number(moment.day, 0),
        Some('B') => out.push_str(MONTHS[moment.month]),
        Some('b' | 'h') => out.push_str(&MONTHS[moment.month][..3]),
        Some('A') => out.push_str(DAYS[moment.weekday]),
        Some('a') => out.push_str(&DAYS[moment.weekday][..3]),
        Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
        Some('Z') => out.push_str("UTC"),
        Some('z') => out.push_str("+0000"),
        Some('F') => {
            let _ = write!(out, "{:04}-{:02}-{:02}", moment.year, moment.month + 1, moment.day);
        }
        Some('T') => {
            let (minute, second) = (moment.seconds / 60 % 60, moment.seconds % 60);
            let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
        }
        Some('%') => out.push('%'),
        Some(other) => {
            out.push('%');
            out.push(other);
        }
        None => out.push('%'),
    }
}
