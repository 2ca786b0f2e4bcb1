// The page: its sections from the content, the commands, and news where it is served.
"use strict";

const page = {
  known: new Map(),

  render(content) {
    palette = content.palette;
    document.title = content.title;
    page.head.replaceChildren(
      make("p", { class: "brand" }, "feddbe report"), make("h1", {}, content.title), make("p", { class: "note" }, content.about),
      ...content.failed.map((words) => make("p", { class: "failed" }, words)), page.status);
    page.nav.replaceChildren(...content.sections.map((section) => make("a", { href: `#${section.id}` }, section.title)));
    const height = scrollY;
    const focused = document.activeElement && document.activeElement.id;
    const parts = content.sections.map((section) => {
      const text = JSON.stringify(section);
      const before = page.known.get(section.id);
      if (before && before.text === text) return before.element;
      const element = page.section(section);
      page.known.set(section.id, { text, element });
      return element;
    });
    parts.forEach((part, i) => {
      if (page.main.children[i] !== part) page.main.insertBefore(part, page.main.children[i] || null);
    });
    while (page.main.children.length > parts.length) page.main.lastElementChild.remove();
    forgetGone();
    scrollTo(scrollX, height);
    const again = focused && document.getElementById(focused);
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
  },

  section(section) {
    const commands = section.commands.length ? opening(`${section.id}-commands`, "Commands behind these numbers", () => section.commands.map(page.command)) : null;
    return make("section", { id: section.id, "aria-labelledby": `${section.id}-title` },
      make("h2", { id: `${section.id}-title` }, section.title), ...section.blocks.map((block) => figures[block.kind](block)), commands);
  },

  command({ what, line }) {
    const code = make("code", {}, line);
    const button = make("button", { type: "button", class: "copy", onclick: () => page.copy(code, button) }, "Copy");
    return make("div", { class: "command" }, make("p", {}, what), make("pre", { tabindex: 0 }, code), button);
  },

  async copy(code, button) {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  },

  /** Ask for news a second after the last answer. */
  async follow(known) {
    try {
      const answer = await fetch("content.json", { cache: "no-store", headers: known ? { "If-None-Match": known } : {} });
      if (answer.status === 200) {
        known = answer.headers.get("ETag");
        page.render(await answer.json());
      }
      page.status.textContent = `Live: as of ${new Date().toLocaleTimeString()}.`;
    } catch {
      page.status.textContent = "No longer served; this is the last that was seen.";
    }
    setTimeout(() => page.follow(known), 1000);
  },

  begin() {
    page.head = make("header");
    page.nav = make("nav", { "aria-label": "Sections" });
    page.main = make("main");
    page.status = make("p", { class: "note", id: "status" });
    document.body.append(page.head, page.nav, page.main);
    page.render(JSON.parse(document.getElementById("content").textContent));
    if (document.documentElement.hasAttribute("data-live")) page.follow(null);
  },
};

page.begin();
