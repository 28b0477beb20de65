use onlyonce::source::{Delivery, Settlement};

fn settle_twice(delivery: Delivery) -> (Settlement, Settlement) {
    (delivery.ack(), delivery.ack())
}

fn ack_and_give_back(delivery: Delivery) -> (Settlement, Settlement) {
    (delivery.ack(), delivery.release(None))
}

fn main() {}
