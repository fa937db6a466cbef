// The messages of the chat that is shown, and the reply as it grows.

import { chats } from "./chats.js";
import { find } from "./elements.js";
import { MessageView } from "./message_view.js";
import { children, path, select } from "./tree.js";

const log = find("log");
const toEnd = find("to-end");
const NEAR_PIXELS = 60;
// Drawing may take this share of the time; with a long last block frames are left out.
const DRAWING_SHARE = 0.25;

export class Conversation {
  constructor(actions) {
    this.actions = { ...actions, redraw: () => this.show() };
    this.views = new Map();
    this.busy = null;
    this.drawing = 0;
    this.rested = 0;
    this.follows = true;
    log.addEventListener("scroll", () => {
      this.follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PIXELS;
      toEnd.hidden = this.follows;
    });
    toEnd.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.following(() => {})).observe(log);
  }

  // Shows the chat's path. Articles of messages that are shown already stay.
  show() {
    const chat = chats.current;
    const shown = path(chat);
    const views = shown.map((it) =>
      this.views.get(it.id)?.message === it ? this.views.get(it.id) : this.made(it),
    );
    this.views = new Map(views.map((it) => [it.message.id, it]));
    const isSame =
      views.length === log.childElementCount && views.every((it, at) => it.article === log.children[at]);
    if (!isSame) log.replaceChildren(...views.map((it) => it.article));
    const versions = children(chat);
    views.forEach((view, at) => this.drawFoot(view, versions.get(view.message.parent), at === views.length - 1));
    find("empty").hidden = views.length > 0;
  }

  made(message) {
    const view = new MessageView(message, this.actions);
    view.draw();
    return view;
  }

  // versions: the messages that stand in its place in other branches, and itself.
  drawFoot(view, versions, isLast) {
    if (view.message === this.busy) return;
    const choose = (at) => {
      select(chats.current, versions[at]);
      this.actions.chosen();
      this.show();
      // The pressed button has gone with its message.
      this.views.get(versions[at].id)?.foot.querySelector(".branches button:enabled")?.focus();
    };
    view.calls.querySelector("form")?.remove();
    view.drawFoot({ at: versions.indexOf(view.message), count: versions.length, choose }, isLast);
  }

  toEnd() {
    this.follows = true;
    log.scrollTop = log.scrollHeight;
    // Articles that weren't drawn before have their heights now.
    requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
  }

  // Shows that a reply is written into a message.
  begin(message) {
    this.busy = message;
    this.show();
    this.grow();
    this.toEnd();
  }

  // Draws what came, in one of the next frames; none is drawn while the page can't be seen.
  grow() {
    this.drawing ||= requestAnimationFrame(() => {
      this.drawing = 0;
      if (performance.now() < this.rested) {
        this.grow();
        return;
      }
      const begun = performance.now();
      this.following(() => this.views.get(this.busy?.id)?.draw(true));
      const taken = performance.now() - begun;
      this.rested = begun + taken / DRAWING_SHARE;
    });
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const message = this.busy;
    this.busy = null;
    this.following(() => {
      this.views.get(message.id)?.draw();
      this.show();
    });
  }

  // Stays at the end of the text unless the reader has scrolled up.
  following(change) {
    const { follows } = this;
    change();
    if (follows) log.scrollTop = log.scrollHeight;
  }
}
