use onlyonce::{Bytes, Context, Event, Handler, HandlerError, async_trait};

struct Commits;

#[async_trait]
impl Handler<sqlx::Postgres> for Commits {
    type Payload = Bytes;

    async fn handle(
        &self,
        cx: &mut Context<'_, sqlx::Postgres>,
        _event: Event<Bytes>,
    ) -> Result<(), HandlerError> {
        cx.tx().commit().await?;
        Ok(())
    }
}

fn main() {}
