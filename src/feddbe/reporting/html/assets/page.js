// The page: builds the sections from the content, shows commands, and follows changes if it is served live.
"use strict";

const page = {
  rendered: new Map(),

  render(content) {
    palette = content.palette;
    document.title = content.title;
    page.head.replaceChildren(
      createNode("p", { class: "brand" }, "feddbe report"),
      createNode("h1", {}, content.title),
      createNode("p", { class: "note" }, content.about),
      ...content.failed.map((message) => createNode("p", { class: "failed" }, message)),
      page.status,
    );
    page.nav.replaceChildren(
      ...content.sections.map((section) => createNode("a", { href: `#${section.id}` }, section.title)),
    );
    const scrollTop = scrollY;
    const focusedId = document.activeElement && document.activeElement.id;
    const parts = content.sections.map((section) => {
      const text = JSON.stringify(section);
      const previous = page.rendered.get(section.id);
      if (previous && previous.text === text) return previous.element;
      const element = page.section(section);
      page.rendered.set(section.id, { text, element });
      return element;
    });
    parts.forEach((part, i) => {
      if (page.main.children[i] !== part) page.main.insertBefore(part, page.main.children[i] || null);
    });
    while (page.main.children.length > parts.length) page.main.lastElementChild.remove();
    dropDetached();
    scrollTo(scrollX, scrollTop);
    const focused = focusedId && document.getElementById(focusedId);
    if (focused && focused !== document.activeElement) focused.focus({ preventScroll: true });
  },

  section(section) {
    const commands = section.commands.length
      ? collapsible(`${section.id}-commands`, "Commands for these numbers", () =>
          section.commands.map(page.command),
        )
      : null;
    return createNode(
      "section",
      { id: section.id, "aria-labelledby": `${section.id}-title` },
      createNode("h2", { id: `${section.id}-title` }, section.title),
      ...section.blocks.map((block) => figures[block.kind](block)),
      commands,
    );
  },

  command({ title, command }) {
    const code = createNode("code", {}, command);
    const button = createNode(
      "button",
      { type: "button", class: "copy", onclick: () => page.copy(code, button) },
      "Copy",
    );
    return createNode(
      "div",
      { class: "command" },
      createNode("p", {}, title),
      createNode("pre", { tabindex: 0 }, code),
      button,
    );
  },

  async copy(code, button) {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
  },

  /** Ask for changes one second after the last response. */
  async follow(etag) {
    try {
      const response = await fetch("content.json", {
        cache: "no-store",
        headers: etag ? { "If-None-Match": etag } : {},
      });
      if (response.status === 200) {
        etag = response.headers.get("ETag");
        page.render(await response.json());
      }
      page.status.textContent = `Live, updated ${new Date().toLocaleTimeString()}.`;
    } catch {
      page.status.textContent = "The server has stopped; this is its last state.";
    }
    setTimeout(() => page.follow(etag), 1000);
  },

  start() {
    page.head = createNode("header");
    page.nav = createNode("nav", { "aria-label": "Sections" });
    page.main = createNode("main");
    page.status = createNode("p", { class: "note", id: "status" });
    document.body.append(page.head, page.nav, page.main);
    page.render(JSON.parse(document.getElementById("content").textContent));
    if (document.documentElement.hasAttribute("data-live")) page.follow(null);
  },
};

page.start();
