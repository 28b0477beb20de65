use std::fmt;
use std::str::FromStr;

/// A schema name that is safe to stand in SQL: letters, digits and underscores, beginning with a
/// letter or an underscore, at most 63 bytes. It is always quoted, so case is kept and reserved
/// words are fine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaName(String);

impl SchemaName {
    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name quoted as an identifier.
    pub(super) fn quoted(&self) -> String {
        format!("\"{}\"", self.0)
    }
}

impl Default for SchemaName {
    fn default() -> Self {
        Self("onlyonce".to_owned())
    }
}

impl FromStr for SchemaName {
    type Err = InvalidName;

    fn from_str(name: &str) -> Result<Self, InvalidName> {
        let first_is_fine = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        let rest_is_fine = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if first_is_fine && rest_is_fine && name.len() <= 63 && !name.starts_with("pg_") {
            Ok(Self(name.to_owned()))
        } else {
            Err(InvalidName(name.chars().take(80).collect()))
        }
    }
}

/// A name that cannot stand in SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidName(String);

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "schema {:?} is not a usable name (letters, digits and underscores, not beginning with a digit or pg_, \
             1 to 63 bytes)",
            self.0
        )
    }
}

impl std::error::Error for InvalidName {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_refused_or_quoted_and_never_more_than_a_name() {
        for bad in [
            "",
            "x\"; drop table t;--",
            "a.b",
            "Tenant-1",
            &"x".repeat(64),
            "é",
            "nul\0",
            "`x`",
            "1a",
            "pg_x",
        ] {
            assert!(bad.parse::<SchemaName>().is_err(), "{bad:?}");
        }
        for good in ["onlyonce", "Tenant_1", "select", &"x".repeat(63)] {
            let name: SchemaName = good.parse().unwrap();
            assert_eq!(name.quoted(), format!("\"{good}\""));
        }
    }
}
