use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS_A_DAY: u64 = 86_400;
/// The last second of the year 9999: RFC 3339 has no later one.
const LAST: u64 = 253_402_300_799;

/// A time in UTC as RFC 3339 writes it, to the microsecond. What it cannot write becomes what it can that is next to it,
/// and times before 1970 its first moment.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, micros) = if since.as_secs() > LAST {
        (LAST, 999_999)
    } else {
        (since.as_secs(), since.subsec_micros())
    };
    let (year, month, day) = date(seconds / SECONDS_A_DAY);
    let of_day = seconds % SECONDS_A_DAY;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    // Every outgoing event has one: by digits it takes much less time than by a format string.
    let mut text = String::with_capacity("0000-00-00T00:00:00.000000Z".len());
    for (number, digits, then) in [
        (year, 4, '-'),
        (month, 2, '-'),
        (day, 2, 'T'),
        (hour, 2, ':'),
        (minute, 2, ':'),
        (second, 2, '.'),
        (micros.into(), 6, 'Z'),
    ] {
        for digit in (0..digits).rev() {
            text.push(char::from(b'0' + (number / 10_u64.pow(digit) % 10) as u8));
        }
        text.push(then);
    }
    text
}

/// Year, month and day, so many days after 1970-01-01.
///
/// Counted in years that begin with March: the day that leap years have more is then their last one, and
/// 400 of them always have equally many days.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    // 1970-01-01 is this many days after 0000-03-01.
    let days = days + 719_468;
    let (era, day) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // From March on, months have 31, 30, 31, 30, 31 days in turn: 153 in five.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (era * 400 + year + next_year, month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000001Z"),
            (951_782_399, "2000-02-28T23:59:59.000001Z"),
            (951_782_400, "2000-02-29T00:00:00.000001Z"),
            (951_868_800, "2000-03-01T00:00:00.000001Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000001Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000001Z"),
            (1_796_051_397, "2026-11-30T15:09:57.000001Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000001Z"),
            (LAST, "9999-12-31T23:59:59.000001Z"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_nanos(1_999);
            assert_eq!(rfc3339(time), text);
        }
    }

    #[test]
    fn what_cannot_be_written_is_written_next_to_it() {
        let long = Duration::from_secs(LAST + 1);
        assert_eq!(rfc3339(UNIX_EPOCH + long), "9999-12-31T23:59:59.999999Z");
        assert_eq!(rfc3339(UNIX_EPOCH - long), "1970-01-01T00:00:00.000000Z");
    }
}
