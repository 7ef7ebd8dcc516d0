//! The date a template may print, given by the caller: rendering reads no clock.

/// A date and time of day, in whatever zone the caller chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CivilTime {
    /// Year.
    pub year: i32,
    /// Month, 1..=12.
    pub month: u8,
    /// Day of the month, 1..=31.
    pub day: u8,
    /// Hour, 0..=23.
    pub hour: u8,
    /// Minute, 0..=59.
    pub minute: u8,
    /// Second, 0..=59.
    pub second: u8,
}

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
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl CivilTime {
    /// From seconds since 1970-01-01T00:00:00 UTC (or the same in another zone, shifted by the caller).
    pub fn from_unix_seconds(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Days to a date in the proleptic Gregorian calendar, by eras of 400 years that begin on 1 March.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Self {
            year: year as i32,
            month: month as u8,
            day: day as u8,
            hour: (rest / 3_600) as u8,
            minute: (rest / 60 % 60) as u8,
            second: (rest % 60) as u8,
        }
    }

    fn day_of_year(self) -> u16 {
        const BEFORE: [u16; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        BEFORE[self.month_index()] + u16::from(self.day) + u16::from(leap && self.month > 2)
    }

    fn month_index(self) -> usize {
        usize::from(self.month.clamp(1, 12)) - 1
    }

    /// 0 for Monday. Sakamoto's method.
    fn weekday(self) -> usize {
        const SHIFT: [i32; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = self.year - i32::from(self.month < 3);
        let sunday_based = year + year.div_euclid(4) - year.div_euclid(100)
            + year.div_euclid(400)
            + SHIFT[self.month_index()]
            + i32::from(self.day);
        (sunday_based - 1).rem_euclid(7) as usize
    }

    /// `strftime` in the C locale, for the directives that templates use; `None` for one it does not know.
    pub fn format(self, format: &str) -> Option<String> {
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let mut directive = characters.next()?;
            // glibc's `%-d`: no padding.
            let bare = directive == '-';
            if bare {
                directive = characters.next()?;
            }
            let mut number = |value: i64, width: usize| {
                let width = if bare { 1 } else { width };
                out.push_str(&format!("{value:0width$}"));
            };
            let twelve = i64::from((self.hour + 11) % 12 + 1);
            match directive {
                'Y' => number(i64::from(self.year), 4),
                'y' => number(i64::from(self.year.rem_euclid(100)), 2),
                'm' => number(i64::from(self.month), 2),
                'd' => number(i64::from(self.day), 2),
                'H' => number(i64::from(self.hour), 2),
                'I' => number(twelve, 2),
                'M' => number(i64::from(self.minute), 2),
                'S' => number(i64::from(self.second), 2),
                'j' => number(i64::from(self.day_of_year()), 3),
                'B' => out.push_str(MONTHS[self.month_index()]),
                'b' => out.push_str(&MONTHS[self.month_index()][..3]),
                'A' => out.push_str(DAYS[self.weekday()]),
                'a' => out.push_str(&DAYS[self.weekday()][..3]),
                'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
                'F' => out.push_str(&self.format("%Y-%m-%d")?),
                'T' => out.push_str(&self.format("%H:%M:%S")?),
                '%' => out.push('%'),
                _ => return None,
            }
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are from CPython's datetime in UTC.
    #[test]
    fn dates_match_another_calendar() {
        let format = "%a %A %d %b %B %Y %y-%m %H:%M:%S %I%p %j %-d %%";
        for (seconds, expected) in [
            (0, "Thu Thursday 01 Jan January 1970 70-01 00:00:00 12AM 001 1 %"),
            (951_826_153, "Tue Tuesday 29 Feb February 2000 00-02 12:09:13 12PM 060 29 %"),
            (1_722_470_399, "Wed Wednesday 31 Jul July 2024 24-07 23:59:59 11PM 213 31 %"),
            (-1, "Wed Wednesday 31 Dec December 1969 69-12 23:59:59 11PM 365 31 %"),
            (4_102_444_800, "Fri Friday 01 Jan January 2100 00-01 00:00:00 12AM 001 1 %"),
        ] {
            assert_eq!(CivilTime::from_unix_seconds(seconds).format(format).as_deref(), Some(expected));
        }
        assert_eq!(CivilTime::from_unix_seconds(0).format("%Q"), None);
        assert_eq!(CivilTime::from_unix_seconds(0).format("%"), None);
    }
}
