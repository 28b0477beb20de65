/// Where an event goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// To the broker, where it is refused, delayed and disturbed.
    Rough,
    /// To the same broker by the same publisher, where it is left alone.
    Calm,
    /// To a table, by another publisher.
    Table,
}

impl Route {
    pub(super) const ALL: [Self; 3] = [Self::Rough, Self::Calm, Self::Table];

    /// As the ledger writes it.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Rough => "rough",
            Self::Calm => "calm",
            Self::Table => "table",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|route| route.as_str() == name)
    }
}
