//! Medians, ratios, and what the system says about this process.

use std::time::Duration;

use super::{BoxError, Broker, Variant};

/// The rates of each variant, round by round.
#[derive(Debug, Default)]
pub(super) struct Report(Vec<(Variant, Vec<f64>)>);

impl Report {
    pub(super) fn add(&mut self, variant: Variant, rate: f64) {
        match self.0.iter_mut().find(|(known, _)| *known == variant) {
            Some((_, rates)) => rates.push(rate),
            None => self.0.push((variant, vec![rate])),
        }
    }

    pub(super) fn print<B: Broker>(&self) {
        let batch = B::BATCH;
        println!();
        for (variant, rates) in &self.0 {
            println!("median   {:<34} {:>8.0}/s", variant.name(), median(rates.clone()));
        }
        let single = Variant::Onlyonce { lanes: 8, batch: 1 };
        let wide = Variant::Onlyonce { lanes: 32, batch: 1 };
        let whole = Variant::BatchHandler { lanes: 8, batch };
        self.ratio(single, Variant::ByHand { lanes: 8, batch: 1 });
        self.ratio(wide, Variant::ByHand { lanes: 32, batch: 1 });
        let batched = Variant::Onlyonce { lanes: 8, batch };
        self.ratio(batched, Variant::ByHand { lanes: 8, batch });
        self.ratio(whole, Variant::ByHandAtOnce { lanes: 8, batch });
        self.ratio(batched, single);
        self.ratio(whole, single);
        self.ratio(
            whole,
            Variant::Bare {
                lanes: B::BARE_LANES,
                batch,
            },
        );
    }

    /// Each round's ratio, and the median of them; nothing if one of the two was not measured.
    fn ratio(&self, one: Variant, other: Variant) {
        let rates = |wanted| Some(&self.0.iter().find(|(variant, _)| *variant == wanted)?.1);
        if let (Some(ones), Some(others)) = (rates(one), rates(other)) {
            let ratios: Vec<f64> = ones.iter().zip(others).map(|(one, other)| one / other).collect();
            let each: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
            println!(
                "ratio    {:<34} / {:<34} {:.2}  ({})",
                one.name(),
                other.name(),
                median(ratios),
                each.join(" ")
            );
        }
    }
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// User and system time of this process, from the scheduler's ticks of 10 ms.
pub fn cpu_time() -> Result<Duration, BoxError> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let ticks = |n: usize| {
        fields
            .split_whitespace()
            .nth(n)
            .and_then(|t| t.parse::<u64>().ok())
            .unwrap_or(0)
    };
    Ok(Duration::from_millis(10 * (ticks(11) + ticks(12))))
}

/// Resident memory of this process in KiB.
pub fn resident() -> Result<u64, BoxError> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .ok_or("no VmRSS in /proc/self/status")?;
    Ok(line
        .split_whitespace()
        .nth(1)
        .ok_or("VmRSS has no value")?
        .parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_or_between_the_two_middles() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![7.0]), 7.0);
    }
}
